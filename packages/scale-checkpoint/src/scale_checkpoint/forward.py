"""What is called in the place of a checkpointed module's forward.

The module stays itself: its class, its names, its keys. Only the attribute `forward` of the instance is another one,
below all hooks, so that a module that gathers its parameters around its forward is not gathered again to recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_checkpoint import buffers, phase, randomness
from scale_checkpoint.nested import put_tensors, take_tensors
from scale_checkpoint.offload import MIN_BYTES, offload_activations, packing
from scale_checkpoint.operators import OperatorPolicy
from scale_checkpoint.places import Target
from scale_checkpoint.recheck import Comparing, active_check
from scale_checkpoint.selective import GivingBack, Keeping, Kept, Key


@dataclass(frozen=True)
class Treatment:
    """What is done with a module's activations between its forward and its backward.

    Attributes:
        recompute: They are computed again; what is kept are the inputs.
        keep: Of a recomputed module, the operators whose results are kept as well.
        offload_to: Where what is kept goes to; None leaves it where it is.
        min_bytes: Smaller storages are not offloaded.
        preserve_random_state: The recomputation draws the random numbers of the forward.
    """

    recompute: bool = True
    keep: OperatorPolicy | None = None
    offload_to: Target | None = None
    min_bytes: int = MIN_BYTES
    preserve_random_state: bool = True


class TreatedForward:
    """A module's forward with a treatment of its activations; it is copied and pickled with the module.

    Args:
        module: The module.
        treatment: What is done.
    """

    def __init__(self, module: nn.Module, treatment: Treatment) -> None:
        # The module's own, as other libraries patch it in; otherwise it is found in the class.
        self.__setstate__((module, treatment, vars(module).get("forward")))

    def __getstate__(self) -> tuple[nn.Module, Treatment, Callable[..., Any] | None]:
        return self._the_module, self.treatment, self.patched

    def __setstate__(self, state: tuple[nn.Module, Treatment, Callable[..., Any] | None]) -> None:
        module, self.treatment, self.patched = state
        self._module = weakref.ref(module)  # The module holds this; so nothing goes round in a circle.
        self._buffers, self._unused = buffers.Watched(), set[Key]()

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "__name__", "__qualname__") and "_module" in vars(self):
            plain = self.plain
            return plain if name == "__wrapped__" else getattr(plain, name)
        raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}")

    @property
    def plain(self) -> Callable[..., Any]:
        """The forward that it stands for, bound."""
        module = self._the_module
        return partial(type(module).forward, module) if self.patched is None else self.patched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module, forward = self._the_module, self.plain
        if not torch.is_grad_enabled() or phase.is_disabled():
            return forward(*args, **kwargs)
        if torch.compiler.is_compiling():
            # The compiler knows torch's own function, and sees to random numbers and buffers itself.
            return (
                checkpoint(partial(forward, **kwargs), *args, use_reentrant=False)
                if self.treatment.recompute
                else forward(*args, **kwargs)
            )
        with self._offloading(module):
            if not self.treatment.recompute:
                return forward(*args, **kwargs)
            call = _Call(module, self.treatment, self._buffers, self._unused)
            if not kwargs and all(isinstance(arg, Tensor) for arg in args):
                return _run(forward, args, call)
            tensors, rest = take_tensors((args, kwargs))
            return _run(partial(_put_and_run, forward, rest), tensors, call)

    @property
    def _the_module(self) -> nn.Module:
        module = self._module()
        if module is None:
            raise ReferenceError("this forward is that of a module that is gone: keep the module, and call it")
        return module

    def _offloading(self, module: nn.Module) -> AbstractContextManager[Any]:
        if self.treatment.offload_to is None:
            return nullcontext()
        return offload_activations(module, to=self.treatment.offload_to, min_bytes=self.treatment.min_bytes)


def treated(module: nn.Module) -> TreatedForward | None:
    """Returns what stands in the place of a module's forward, or None where it is its own."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, TreatedForward) else None


def _put_and_run(forward: Callable[..., Any], rest: Any, *tensors: Tensor) -> Any:
    args, kwargs = put_tensors(rest, tensors)
    return forward(*args, **kwargs)


def _run(function: Callable[..., Any], tensors: Any, call: _Call) -> Any:
    # Random numbers are seen to by the call: torch looks at the devices of these tensors alone.
    return checkpoint(
        function,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (_First(call), _Again(call)),
    )


class _Call:
    """One call of a module: what its recomputation is to find as the call has found it.

    Args:
        module: The module.
        treatment: Of its activations.
        watched: Its buffers, over all calls.
        unused: Which results no recomputation has asked for, over all calls.

    Attributes:
        drawn: The generators that the forward has drawn from.
        changed: The buffers that it has changed.
        kept: The results that it has kept, if it keeps some.
        check: Compares the recomputation with it, where that is wanted.
        steps: What it has done, for the check.
    """

    def __init__(self, module: nn.Module, treatment: Treatment, watched: buffers.Watched, unused: set[Key]) -> None:
        self.module, self.treatment, self.watched = module, treatment, watched
        self.drawn: list[randomness.Drawn] = []
        self.changed: list[buffers.Changed] = []
        self.kept: Kept | None = None
        if treatment.keep is not None:
            to, least = treatment.offload_to, treatment.min_bytes
            self.kept = Kept(treatment.keep, unused, None if to is None else packing([module], to, least))
        self.check = active_check()
        self.steps: list[Any] = []

    def contexts(self) -> tuple[_First, _Again]:
        """Returns what torch enters around the forward, and around each recomputation of it."""
        return _First(self), _Again(self)


class _First(AbstractContextManager[None]):
    """Around the forward: finds out what it draws and changes."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        call = self._call
        self._drawn = randomness.states() if call.treatment.preserve_random_state else []
        self._seen = call.watched.look(call.module)
        self._stack = ExitStack()
        self._stack.enter_context(phase.checkpointing())
        if call.kept is not None:
            self._stack.enter_context(Keeping(call.kept))
        if call.check is not None:
            call.steps = self._stack.enter_context(Comparing(call.check, call.module)).steps

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if error is None:
            call = self._call
            if call.kept is not None:
                call.kept.close()
            call.changed = call.watched.changed_since(self._seen)
            if call.treatment.preserve_random_state:
                call.drawn = randomness.drawn_since(self._drawn)
        del self._drawn, self._seen, self._stack


class _Again(AbstractContextManager[None]):
    """Around a recomputation: gives it what the forward has found, and takes it back."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        call = self._call
        self._stack = ExitStack()
        if call.drawn:
            self._stack.enter_context(randomness.replaying(call.drawn))
        if call.changed:
            self._stack.enter_context(buffers.replaying(call.changed))
        self._stack.enter_context(phase.recomputing())
        if call.kept is not None:
            call.kept.fetch()
            self._stack.enter_context(GivingBack(call.kept))
        if call.check is not None:
            self._stack.enter_context(Comparing(call.check, call.module, call.steps))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        if self._call.kept is not None:
            self._call.kept.note_unused()
