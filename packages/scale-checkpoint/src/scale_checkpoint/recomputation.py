"""One call of a module that is computed again: what its recomputation is to find as the call has found it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from scale_checkpoint import buffers, phase, randomness, weights
from scale_checkpoint.nested import put_tensors, strangers_in, take_tensors
from scale_checkpoint.offload import sending
from scale_checkpoint.recheck import Comparing, active_check
from scale_checkpoint.selective import GivingBack, Keeping, Kept, Key
from scale_checkpoint.treatment import Treatment
from scale_checkpoint.versions import Watch


class Learned:
    """What the calls of a module have shown of it, over all of them.

    Attributes:
        buffers: Which of its buffers its forward changes.
        unused: Which kept results no recomputation has asked for.
    """

    def __init__(self) -> None:
        self.buffers, self.unused = buffers.Watched(), set[Key]()


def run_recomputed(
    module: nn.Module, forward: Callable[..., Any], given: tuple[Any, Any], treatment: Treatment, learned: Learned
) -> Any:
    """Runs a module's forward so that autograd keeps its inputs alone; returns what it returns.

    Args:
        module: The module.
        forward: Of the module, bound.
        given: Its arguments, and those by keyword.
        treatment: Of its activations.
        learned: Of the module; is added to.

    Raises:
        RuntimeError: What the forward does could not be done again: it has changed what it was given in place, or a
            buffer for the first time after calls in which it had not.
    """
    args, kwargs = given
    if not kwargs and all(isinstance(arg, Tensor) for arg in args):
        return _run(forward, args, _Call(module, treatment, learned, list))
    tensors, rest = take_tensors(given)
    call = _Call(module, treatment, learned, partial(strangers_in, rest))
    return _run(_Nested(forward, given, rest), tensors, call)


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
    """What is known of one call.

    Args:
        module: The module.
        treatment: Of its activations.
        learned: Of the module.
        strangers: Returns the classes of what it was given that could not be taken apart.

    Attributes:
        drawn: The generators that the forward has drawn from.
        changed: The buffers that it has changed.
        used: The parameters and the other buffers that it has computed with.
        kept: The results that it has kept, if it keeps some.
        saved: The tensors that autograd saves in it.
        check: Compares the recomputation with it, where that is wanted.
        steps: What it has done, for the check.
    """

    def __init__(
        self, module: nn.Module, treatment: Treatment, learned: Learned, strangers: Callable[[], Sequence[str]]
    ) -> None:
        self.module, self.treatment, self.watched = module, treatment, learned.buffers
        self.drawn: list[randomness.Drawn] = []
        self.changed: list[buffers.Changed] = []
        self.used: list[weights.Used] = []
        self.kept: Kept | None = None
        if treatment.keep is not None:
            to, least = treatment.offload_to, treatment.min_bytes
            self.kept = Kept(treatment.keep, learned.unused, None if to is None else sending([module], to, least))
        self.saved = Watch(type(module).__name__, strangers)
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
        self._stack.enter_context(call.saved.forward())
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
        with ExitStack() as stack:  # What was entered is left again where the next one raises.
            if call.drawn:
                stack.enter_context(randomness.replaying(call.drawn))
            if replaced := weights.replaced(call.used):
                stack.enter_context(weights.put_back(replaced))
            if call.changed:
                stack.enter_context(buffers.replaying(call.changed))
            stack.enter_context(phase.recomputing())
            if call.kept is not None:
                call.kept.fetch()
                stack.enter_context(GivingBack(call.kept))
            if call.check is not None:
                stack.enter_context(Comparing(call.check, call.module, call.steps))
            stack.enter_context(call.saved.recomputation())
            self._stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        # torch ends a recomputation by an error of its own as soon as it has all that was saved.
        if self._call.kept is not None and (error is None or isinstance(error, _StopRecomputationError)):
            self._call.kept.note_unused()


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
