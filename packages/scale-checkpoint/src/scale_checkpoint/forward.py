"""What is called in the place of a checkpointed module's forward.

The module stays itself: its class, its names, its keys. Only the attribute `forward` of the instance is another one,
below all hooks, so that a module that gathers its parameters around its forward is not gathered again to recompute.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_checkpoint import buffers, phase, randomness, weights
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

    def is_of(self, module: nn.Module) -> bool:
        """Whether it is this module's, and not that of one of which this is a shallow copy."""
        return self._module() is module

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
        _check_no_transform(module)
        with self._offloading(module):
            if not self.treatment.recompute:
                return forward(*args, **kwargs)
            call = _Call(module, self.treatment, self._buffers, self._unused)
            if not kwargs and all(isinstance(arg, Tensor) for arg in args):
                return _run(forward, args, call)
            tensors, rest = take_tensors((args, kwargs))
            return _run(_Nested(forward, (args, kwargs), rest), tensors, call)

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
    """Returns what stands in the place of a module's forward, or None where it is its own or that of another module."""
    forward = vars(module).get("forward")
    return forward if isinstance(forward, TreatedForward) and forward.is_of(module) else None


def treat(module: nn.Module, forward: TreatedForward) -> None:
    """Puts a treated forward in the place of the module's own, which has none at this time."""
    object.__setattr__(module, "forward", forward)
    if _check_is_own not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_check_is_own)


def treat_no_more(module: nn.Module) -> None:
    """Puts a module's own forward back, or that which was patched in before it was treated."""
    present = vars(module).get("forward")
    if not isinstance(present, TreatedForward):
        return
    if not present.is_of(module):  # A shallow copy shares its hooks with the original, which goes on to need them.
        module.__dict__["_forward_pre_hooks"] = module._forward_pre_hooks.copy()
    for number in [number for number, hook in module._forward_pre_hooks.items() if hook is _check_is_own]:
        del module._forward_pre_hooks[number]
    if present.patched is None:
        del module.__dict__["forward"]
    else:
        object.__setattr__(module, "forward", present.patched)


def _check_is_own(module: nn.Module, args: Any) -> None:
    """Before a module's forward, which knows only the module that it was made for: sees a shallow copy of that."""
    forward = vars(module).get("forward")
    if isinstance(forward, TreatedForward) and not forward.is_of(module):
        title = type(module).__name__
        raise RuntimeError(
            f"this {title} is a shallow copy of a {title} that is checkpointed or offloaded, and would run the forward "
            "of the original: take copy.deepcopy, or treat the copy by itself, with apply_checkpointing(copy, "
            '"recompute") or "keep" (nn.DataParallel makes such copies, too: take DistributedDataParallel)'
        )


def _check_no_transform(module: nn.Module) -> None:
    """Transforms of `torch.func` leave no say in what is saved; torch's own errors speak of its inside."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            f"a {type(module).__name__} is checkpointed or offloaded, which transforms of torch.func (vmap, grad, jvp) "
            "cannot do: call them inside of `with scale_checkpoint.disable_checkpointing():`"
        )


class _Nested:
    """A forward with containers among its arguments, as a function of the tensors alone.

    The forward gets the caller's own containers, which it may fill; a recomputation gets new ones, as those were.

    Args:
        forward: Of the module.
        given: Its arguments, and those by keyword.
        rest: The same without the tensors.
    """

    def __init__(self, forward: Callable[..., Any], given: tuple[Any, Any], rest: Any) -> None:
        self._forward, self._rest = forward, rest
        self._given: tuple[Any, Any] | None = given

    def __call__(self, *tensors: Tensor) -> Any:
        given, self._given = self._given, None
        args, kwargs = put_tensors(self._rest, tensors) if given is None else given
        return self._forward(*args, **kwargs)


def _run(function: Callable[..., Any], tensors: Sequence[Tensor], call: _Call) -> Any:
    # Random numbers are seen to by the call: torch looks at the devices of these tensors alone.
    return checkpoint(
        function,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (_First(call, tensors), _Again(call)),
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
        used: The parameters and the other buffers that it has computed with.
        kept: The results that it has kept, if it keeps some.
        check: Compares the recomputation with it, where that is wanted.
        steps: What it has done, for the check.
    """

    def __init__(self, module: nn.Module, treatment: Treatment, watched: buffers.Watched, unused: set[Key]) -> None:
        self.module, self.treatment, self.watched = module, treatment, watched
        self.drawn: list[randomness.Drawn] = []
        self.changed: list[buffers.Changed] = []
        self.used: list[weights.Used] = []
        self.kept: Kept | None = None
        if treatment.keep is not None:
            to, least = treatment.offload_to, treatment.min_bytes
            self.kept = Kept(treatment.keep, unused, None if to is None else packing([module], to, least))
        self.check = active_check()
        self.steps: list[Any] = []


class _First(AbstractContextManager[None]):
    """Around the forward: finds out what it draws, changes and computes with.

    Args:
        call: Is told.
        tensors: That the forward is given.
    """

    def __init__(self, call: _Call, tensors: Sequence[Tensor]) -> None:
        self._call = call
        self._given = [(tensor, _version_of(tensor)) for tensor in tensors]

    def __enter__(self) -> None:
        call = self._call
        self._parts = buffers.parts_of(call.module)
        self._drawn = randomness.states() if call.treatment.preserve_random_state else []
        self._seen = call.watched.look(self._parts)
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
            call.changed = call.watched.changed_since(self._seen)
            if call.treatment.preserve_random_state:
                call.drawn = randomness.drawn_since(self._drawn)
            call.used = weights.used_by(self._parts)
            self._check_given()
        del self._drawn, self._seen, self._stack, self._parts, self._given

    def _check_given(self) -> None:
        """Autograd would notice as well, but in the backward, and could not say where."""
        changed = [tensor for tensor, version in self._given if _version_of(tensor) != version]
        if not changed:
            return
        given = (tensor for tensor, _ in self._given)
        if any(tensor.requires_grad for tensor in (*given, *(use.tensor for use in self._call.used))):
            title = type(self._call.module).__name__
            raise RuntimeError(
                f"the forward of a {title} changes a tensor {list(changed[0].shape)} that it is given in place, so it "
                "could not be computed again: let it change a copy (inplace=False where its first layer has that), or "
                "leave it out of the checkpointed ones"
            )


class _Again(AbstractContextManager[None]):
    """Around a recomputation: gives it what the forward has found, and takes it back."""

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        call = self._call
        self._stack = ExitStack()
        if call.drawn:
            self._stack.enter_context(randomness.replaying(call.drawn))
        if replaced := weights.replaced(call.used):
            self._stack.enter_context(weights.put_back(replaced))
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


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
