"""One call of a module that is computed again: what its recomputation is to find as the call has found it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from scale_checkpoint import state as phase
from scale_checkpoint.offload.offload import MIN_BYTES, Sender
from scale_checkpoint.offload.storage import Target
from scale_checkpoint.recompute import buffers
from scale_checkpoint.recompute import params as weights
from scale_checkpoint.recompute import recompute as modes
from scale_checkpoint.recompute import rng as randomness
from scale_checkpoint.recompute.buffer_replay import Replay, Standing, decides_results, standing_in
from scale_checkpoint.recompute.determinism_check import Check, Comparing, active_check
from scale_checkpoint.recompute.policy import OperatorPolicy
from scale_checkpoint.recompute.selective import GivingBack, Keeping, Kept, Key
from scale_checkpoint.saved_tensors import Watch
from scale_checkpoint.tree import put_tensors, strangers_in, take_tensors


@dataclass(frozen=True)
class Treatment:
    """The settings of one module.

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


_NOTHING = nullcontext()


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
    is_first = True

    def run(*given: Tensor) -> Any:
        nonlocal is_first
        if not is_first:
            return function(*given)
        is_first = False
        try:
            return function(*given)
        except BaseException as error:  # torch before 2.13 would leave its contexts open, and their hooks in force.
            call.failure = error

    # Random numbers are seen to by the call: torch looks at the devices of these tensors alone.
    result = checkpoint(
        run,
        *tensors,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (_first(call, tensors), _Again(call)),
    )
    if call.failure is None:
        return result
    failure, call.failure = call.failure, None
    try:
        raise failure
    finally:
        del failure  # Its traceback holds this frame.


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
        standing: Those that it has left alone.
        used: The parameters and buffers that it has computed with.
        modes: The modes that its parts have run in.
        kept: The results that it has kept, if it keeps some.
        failure: What the forward has raised, until it is raised to the caller.
        saved: The tensors that autograd saves in it.
        check: Compares the recomputation with it, where that is wanted.
        is_over: Whether the forward has ended; a backward inside of it may recompute before.
        steps: What it has done, for the check.
    """

    def __init__(
        self, module: nn.Module, treatment: Treatment, learned: Learned, strangers: Callable[[], Sequence[str]]
    ) -> None:
        self.module, self.treatment, self.watched = module, treatment, learned.buffers
        self.drawn: list[randomness.Drawn] = []
        self.changed: list[buffers.Changed] = []
        self.standing: list[Standing] = []
        self.modes: list[modes.Mode] = []
        self.used: list[weights.Row] = []
        self.kept: Kept | None = None
        if treatment.keep is not None:
            to, least = treatment.offload_to, treatment.min_bytes
            self.kept = Kept(treatment.keep, learned.unused, None if to is None else Sender([module], to, least).send)
        self.saved = Watch(module._get_name(), strangers)
        self.check, self.is_over = active_check(), False
        self.steps: list[Any] = []
        self.failure: BaseException | None = None
        self._parts: list[nn.Module] = []
        self._states: list[randomness.Drawn] = []
        self._seen: list[buffers.Seen] = []

    def look(self) -> None:
        """Before the forward: notes what there is."""
        self._parts = buffers.parts_of(self.module)
        self.modes = modes.modes_of(self._parts)
        self._states = randomness.states() if self.treatment.preserve_random_state else []
        self._seen = self.watched.look(self._parts)

    def look_back(self) -> None:
        """After the forward, or inside of it before a recomputation of what has run so far: notes what it has done."""
        self.changed = self.watched.changed_since(self._seen)
        self.drawn = randomness.drawn_since(self._states) if self._states else []
        self.standing = standing_in(self._parts, self.changed)

    def end(self) -> None:
        """After the forward: notes what it has done, and lets go of what there was."""
        self.look_back()
        self.used = weights.used_by(self._parts, self.changed)
        self.is_over = True
        self._parts, self._states, self._seen = [], [], []

    @property
    def recheck(self) -> Check | None:
        """What compares a recomputation; None also inside of the forward, of which there is only a part by then."""
        return self.check if self.is_over else None


@contextmanager
def _first(call: _Call, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Around the forward: finds out what it draws, changes and computes with.

    Args:
        call: Is told.
        tensors: That the forward is given.

    Raises:
        RuntimeError: See `run_recomputed`.
    """
    given = [(tensor, buffers.version_of(tensor)) for tensor in tensors]
    call.look()
    with phase.checkpointing(), call.saved.forward(), _following(call):
        yield
    if call.failure is None:
        call.end()
        _check_given(call, given)


def _following(call: _Call) -> AbstractContextManager[Any]:
    """Follows the operators of a forward, where somebody wants to know of them."""
    if call.kept is None and call.check is None:
        return _NOTHING
    with ExitStack() as stack:
        if call.kept is not None:
            stack.enter_context(Keeping(call.kept))
        if call.check is not None:
            call.steps = stack.enter_context(Comparing(call.check, call.module)).steps
        return stack.pop_all()


def _check_given(call: _Call, given: Sequence[tuple[Tensor, int]]) -> None:
    """Autograd would notice as well, but in the backward, and could not say where."""
    changed = [tensor for tensor, version in given if buffers.version_of(tensor) != version]
    if not changed:
        return
    if any(tensor.requires_grad for tensor, _ in given) or any(weights.ask_for_gradients(call.used)):
        title = call.module._get_name()
        raise RuntimeError(
            f"the forward of a {title} changes a tensor {list(changed[0].shape)} that it is given in place, so it "
            "could not be computed again: let it change a copy (inplace=False where its first layer has that), or "
            "leave it out of the checkpointed ones"
        )


@contextmanager
def _again(call: _Call) -> Iterator[None]:
    """Around a recomputation: gives it what the forward has found, and takes it back.

    Args:
        call: Of the forward.

    Raises:
        RuntimeError: What the forward has computed with was changed since, or the recomputation has changed other
            buffers than the forward.
    """
    if not call.is_over:
        call.look_back()
    # The operator at which torch would end it may be the one that differs.
    whole = call.is_over and (call.check is not None or any(map(decides_results, call.changed)))
    replay = Replay(call.changed, call.standing)
    with phase.recomputing(), _found_again(call, replay), call.saved.recomputation(whole, replay.read):
        try:
            yield
        except _StopRecomputationError:  # By which torch ends it as soon as it has all that was saved.
            _note_unused(call)
            raise
        _note_unused(call)


class _Again(AbstractContextManager[None]):
    """`_again`, once for each backward over a graph that is retained: torch enters the same object each time.

    Args:
        call: Of the forward.
    """

    def __init__(self, call: _Call) -> None:
        self._call = call

    def __enter__(self) -> None:
        self._now = _again(self._call)
        self._now.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._now.__exit__(kind, error, traceback)


def _found_again(call: _Call, replay: Replay) -> AbstractContextManager[Any]:
    """What the forward has found, and is not there any more or not to be changed: of most modules nothing."""
    switched, replaced = modes.changed_since(call.modes), weights.replaced(call.used)
    if not (
        call.drawn or switched or replaced or call.changed or call.standing or call.kept is not None or call.recheck
    ):
        return _NOTHING
    with ExitStack() as stack:  # What was entered is left again where the next one raises.
        if call.drawn:
            stack.enter_context(randomness.replaying(call.drawn))
        if switched:
            stack.enter_context(modes.restored(switched))
        if replaced:
            stack.enter_context(weights.put_back(replaced))
        if call.changed or call.standing:
            stack.enter_context(replay)
        if call.kept is not None:
            call.kept.fetch()
            stack.enter_context(GivingBack(call.kept))
        if call.recheck is not None:
            stack.enter_context(Comparing(call.recheck, call.module, call.steps))
        return stack.pop_all()


def _note_unused(call: _Call) -> None:
    if call.kept is not None and call.is_over:
        call.kept.note_unused()


# The mode that each part of a module was in, `train()` or `eval()`: a recomputation runs in the forward's.
#
# Between a forward and its backward a model may be set to the other one, to be evaluated; the plain module's gradients
# don't know of that, since its forward is over.

Mode = tuple[nn.Module, bool]
"""A module, and whether it is in training."""


def modes_of(parts: Iterable[nn.Module]) -> list[Mode]:
    """Returns the mode of each part.

    Args:
        parts: The module and all that it holds.
    """
    return [(part, part.training) for part in parts]


def changed_since(modes: Iterable[Mode]) -> list[Mode]:
    """Returns those that are in the other mode by now.

    Args:
        modes: Of `modes_of`.
    """
    return [(part, training) for part, training in modes if part.training is not training]


@contextmanager
def restored(modes: Sequence[Mode]) -> Iterator[None]:
    """Inside, the parts are in these modes; afterwards in the other ones.

    Args:
        modes: Of `changed_since`.
    """
    try:
        for part, training in modes:
            part.training = training
        yield
    finally:
        for part, training in modes:
            part.training = not training
