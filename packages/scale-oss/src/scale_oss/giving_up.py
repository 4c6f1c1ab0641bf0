"""A pass that one rank does not bring to its end: all ranks give it up, and it leaves no trace.

A rank that fails knows what the others still wait for: the rest of the order in which buckets are reduced. So it gives
them zeros for it, and says at the end that it has failed; then all ranks raise, and nothing has happened. Where it
fails in a pass under `no_sync()`, that end is the one of the pass by which the step is reduced. One that has left out a
backward pass, as where its loss failed or a batch was skipped, does so for it before it begins another.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scale_core.contract import ScaleDistributedError, StepError
from scale_core.giving_up import given_up, tell, tell_reasons
from scale_core.pending import TransferError
from scale_oss.notes import LEFT_OUT, Notes

if TYPE_CHECKING:  # reducing.py stands on this file.
    from scale_oss.reducing import Reducer


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
