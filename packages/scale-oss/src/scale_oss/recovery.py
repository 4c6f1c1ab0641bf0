"""A pass that one rank does not bring to its end: all ranks give it up, and it leaves no trace.

A rank that fails knows what the others still wait for: the rest of the order in which buckets are reduced. So it gives
them zeros for it, and says at the end that it has failed; then all ranks raise, and nothing has happened. Where it
fails in a pass under `no_sync()`, that end is the one of the pass by which the step is reduced. One that has left out a
backward pass, as where its loss failed or a batch was skipped, does so for it before it begins another.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from scale_core.comm.work import TransferError
from scale_core.consistency.contract import ScaleDistributedError, StepError
from scale_core.consistency.recovery import given_up, tell, tell_reasons
from scale_core.tree import tensors_in

if TYPE_CHECKING:
    from scale_oss.reducer import Reducer


LEFT_OUT = (
    "its forward pass was followed by no backward pass: an error in its loss was caught, its batch was skipped, or a "
    "forward pass of this rank alone was not under torch.no_grad()"
)
"""Why a rank has failed that did not run a pass at all."""


class Notes(NamedTuple):
    """What a rank says of itself at the end of a pass.

    Attributes:
        num_late: Buckets that have got gradients after their reduction.
        num_missing: Parameters that it has reduced as zeros.
        num_unmet: Forward passes to which no backward has come.
        order_is_known: It has learned in which order buckets become ready.
        failed: It has failed, and given the others zeros.
        left_out: It has done so for a pass that it did not run at all.
        brought_some: It has had gradients to reduce.
    """

    num_late: int = 0
    num_missing: int = 0
    num_unmet: int = 0
    order_is_known: bool = False
    failed: bool = False
    left_out: bool = False
    brought_some: bool = False

    def packed(self) -> tuple[int, int, int]:
        """As three integers, which is what ranks can tell each other there."""
        flags = self.order_is_known + 2 * self.failed + 4 * self.left_out + 8 * self.brought_some
        return self.num_late, self.num_missing, 16 * self.num_unmet + flags

    @staticmethod
    def unpacked(row: Sequence[int]) -> Notes:
        num_late, num_missing, rest = row
        flags = (bool(rest & bit) for bit in (1, 2, 4, 8))
        return Notes(num_late, num_missing, rest // 16, *flags)


def not_alike(step: int, unmet: Sequence[int]) -> str:
    """In words: ranks have different numbers of forward passes without a backward."""
    return (
        f"pass {step} was given up on all ranks: expected each rank's backward to follow the same forward passes, but "
        f"there are forward passes without a backward, {list(unmet)} by rank. A rank that skips a batch leaves the "
        "others in its backward, and averages its next one with theirs: skip it on all ranks; and put a forward pass "
        "that is only looked at under torch.no_grad()"
    )


_live: weakref.WeakSet[Reducer] = weakref.WeakSet()


def follow(reducer: Reducer) -> None:
    """A reducer begins its life; it is not kept alive here."""
    _live.add(reducer)


def forward_has_failed(reducer: Reducer, error: Exception) -> None:
    """Gives up the backward pass that can't follow now; the error is about to be raised to the user."""
    if _can_give_up(reducer, error):
        abort(reducer, error)


def backward_has_failed(reducer: Reducer) -> None:
    """Autograd has dropped the backward pass that ran; whatever it was is being raised to the user."""
    if reducer.is_watched:
        last = reducer.contract.history.last_event
        where = f" after the {last}" if last is not None else ""
        abort(reducer, RuntimeError(f"its backward pass failed{where}, with an error that is raised there"))


def abort(reducer: Reducer, error: BaseException) -> None:
    """Gives the pass up, together with the others where that can be, and is as before it."""
    contract = reducer.contract
    reducer.is_watched = False
    try:
        if isinstance(error, StepError):
            pass  # All ranks know.
        elif _can_give_up(reducer, error):
            _serve(reducer, Notes(failed=True))
            error.add_note(in_words(reducer, tell_reasons(error, contract)))
        else:
            contract.report_failure(error)
    except ScaleDistributedError:
        pass  # What the user is about to see is the error of the pass; the next one says that the ranks are lost.
    finally:
        _end(reducer)
        reducer.forwards.clear()
        reducer.sums.restore()
        reducer.begins_step = True
        for bucket in reducer.buckets:
            bucket.forget_packed()


def make_up_for_left_out(reducer: Reducer, *, in_step: bool) -> None:
    """Gives up the backward passes that the others have run, or still run, and this rank has left out.

    The one that runs now keeps the gradients that it has brought already.

    Args:
        reducer: Of the model.
        in_step: As in `Forwards.one_is_left_out`.

    Raises:
        ScaleDistributedError: The others did something else, or can't be reached.
    """
    while not reducer.contract.alone and reducer.forwards.one_is_left_out(in_step=in_step):
        try:
            if all(notes.left_out for notes in _serve(reducer, Notes(failed=True, left_out=True))):
                reducer.forwards.expect()
            else:
                reducer.forwards.give_up()
                tell(LEFT_OUT, reducer.contract)
        finally:
            _end(reducer)


def in_words(reducer: Reducer, reasons: Sequence[str]) -> str:
    """Who has failed, and why; see `given_up`."""
    what_now = (
        "Parameters and optimizer state are as before it, and so are gradients that were accumulated: call "
        "optimizer.zero_grad(), and training can go on with the next batch."
    )
    return given_up(f"pass {reducer.contract.step}", reasons, what_now)


def _can_give_up(reducer: Reducer, error: BaseException) -> bool:
    """Whether the others can be told of this error where they wait for this rank."""
    if reducer.contract.alone or isinstance(error, TransferError | ScaleDistributedError):
        return False
    # Of two models in one backward pass one tells the ranks that they have lost each other; nobody waits for the other.
    if any(each.contract.is_broken and each.contract.group == reducer.contract.group for each in _live):
        return False
    return reducer.current is None or not reducer.current.is_closed


def _serve(reducer: Reducer, mine: Notes) -> list[Notes]:
    """Gives the others zeros for all that they still wait for; returns what each rank says at the end.

    Raises:
        ScaleDistributedError: The others did something else, or can't be reached.
    """
    if reducer.current is None:
        reducer.begin()
    assert reducer.current is not None, "a pass that has begun runs"
    for bucket in reducer.buckets:
        bucket.forget_packed()
    reducer.current.reduce_rest(lambda number: None)
    return reducer.compare(reducer.current, mine)


def _end(reducer: Reducer) -> None:
    """Nothing comes of the pass."""
    reducer.current = None
    reducer.contract.history.break_off()
    for bucket in reducer.buckets:
        bucket.reduction.abandon()


@dataclass(eq=False)
class _Forward:
    """One forward pass: whether a backward has come to it, and whether none can come any more."""

    is_met: bool = False
    is_dropped: bool = False


class Forwards:
    """This rank's forward passes for training, since the ranks were last found to do the same.

    Args:
        met: Called when a backward comes to the outputs of one, before it goes on; and not held here.
    """

    def __init__(self, met: Callable[[], None]) -> None:
        self._met = weakref.WeakMethod(met)
        self._all: list[_Forward] = []  # in order
        self._per_pass = 1  # how many the last backward pass has come to
        self._usual = 0  # how many all ranks alike leave without one, such as those whose outputs are only looked at

    def watch(self, outputs: Any, *, counts: bool = True) -> None:
        """Follows what becomes of the outputs of a forward pass.

        Args:
            outputs: Tensors anywhere in them.
            counts: All ranks must run its backward; those that are not reduced some rank may leave out.
        """
        # A view that is changed in place gets another history, its base keeps its own.
        roots = [tensor._base if tensor._base is not None else tensor for tensor in tensors_in(outputs)]
        nodes = {root.grad_fn for root in roots if root.grad_fn is not None}
        if not nodes:
            return
        forward = _Forward()
        if counts:
            self._all.append(forward)
        watch = _Watch(forward, self._met)
        for node in nodes:
            node.register_prehook(watch)

    def one_is_left_out(self, *, in_step: bool) -> bool:
        """Whether this rank has left out a backward pass, as far as it can tell now.

        Args:
            in_step: Another forward is about to begin, and all ranks must do that together: then one whose graph is
                still there counts, too, if a backward has always come at this point.
        """
        unmet = self._unmet()
        if len(unmet) <= self._usual:
            return False
        return any(forward.is_dropped for forward in unmet) or (in_step and len(unmet) >= self._per_pass + self._usual)

    def give_up(self) -> None:
        """The pass that was left out is given up: forgets the forwards that belong to it."""
        for forward in self._unmet()[: self._per_pass]:
            self._all.remove(forward)

    def expect(self) -> None:
        """All ranks have left out as many alike, so it is nothing that has gone wrong."""
        self._usual = self.num_unmet

    @property
    def num_unmet(self) -> int:
        """To how many no backward has come."""
        return len(self._unmet())

    def settle(self) -> None:
        """A backward pass has ended well: those that it has not come to may still wait for theirs."""
        self._usual = min(self._usual, self.num_unmet)
        self._per_pass = sum(forward.is_met for forward in self._all) or self._per_pass
        self._all = [forward for forward in self._all if not (forward.is_met or forward.is_dropped)]

    def clear(self) -> None:
        """A pass has failed, and with it all forwards before."""
        self._all = []

    def _unmet(self) -> list[_Forward]:
        return [forward for forward in self._all if not forward.is_met]


class _Watch:
    """A hook of the graph: called when a backward comes to the outputs, and dropped with the graph."""

    def __init__(self, forward: _Forward, met: weakref.WeakMethod[Callable[[], None]]) -> None:
        self._forward, self._met = forward, met

    def __call__(self, grads: tuple[Tensor | None, ...]) -> None:
        self._forward.is_met = True
        met = self._met()
        if met is not None:
            met()

    def __del__(self) -> None:
        self._forward.is_dropped = True
