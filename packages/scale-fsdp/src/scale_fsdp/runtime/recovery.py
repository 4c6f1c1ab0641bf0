"""Coordinated abort: one rank fails in the middle of a step, all ranks abort the step, and training can go on.

A rank that raises alone leaves the others waiting for its shards. But every step is like the last one, so the rank
that has failed knows which collectives the others wait for: it replays the rest of that order, with its shards and
with zeros for its gradients, and says at the end that it has failed. Then every rank raises, no optimizer has stepped,
and what was reduced in this step is dropped. In the first step there is no order to replay, but there all ranks
compare each event: the rank that has failed comes to the next comparison and says so. Where neither is so, as in the
third micro-batch of the first step, it leaves its error in the store, and the others raise when their wait times out.
"""

from __future__ import annotations

from collections.abc import Sequence

from scale_core.consistency.all_ranks import all_gather_failures, format_abort, format_traceback
from scale_core.consistency.backward_pass import PassStatus, end_pass
from scale_core.consistency.contract import History
from scale_core.consistency.execution_order import END, Event, Pass
from scale_core.errors import ScaleDistributedError, StepError
from scale_core.flat.buffer import State
from scale_core.hooks.gradients import has_reduced_grad_hooks, is_consumed_in_backward
from scale_fsdp.runtime.unit import GATHERING_PHASES, Unit, UnitContext

SKIPPED_BACKWARD = (
    "this rank has begun another forward pass in place of the backward pass: its loss raised an error, or the rank has "
    "skipped the batch"
)


def can_abort(root: UnitContext) -> bool:
    """Whether an error that is raised now can be raised on all ranks."""
    return root.contract.is_single_rank or root.contract.checks_every_event or _remaining(root) is not None


def abort_on_all_ranks(root: UnitContext, error: BaseException) -> bool:
    """Replays the rest of this cycle of passes for the other ranks, and tells them that this one failed.

    Returns:
        Whether it could: the order of the remaining events is known, and the ranks have not lost each other.
    """
    if isinstance(error, StepError) or error is root.shared_error:
        return True
    contract, remaining = root.contract, _remaining(root)
    if contract.is_single_rank or contract.is_broken or isinstance(error, ScaleDistributedError):
        return False
    if remaining is None and not contract.checks_every_event:
        return False
    for unit in root.units:
        for buffer in unit.buffers:
            buffer.contribute_zeros()
    if remaining is None:
        _start_last_event(root)
        error.add_note(contract.abort(format_traceback(error)))
        return True
    for unit in root.units:
        unit.wait_reduced()
        if not any(buffer.gather_has_second_half for buffer in unit.buffers):  # That is yet to come.
            unit.release(keep_part=True)
    error.add_note(abort_message(root, _replay_all(root, remaining, error)))
    return True


def end_skipped_backward(root: UnitContext) -> None:
    """A forward follows a forward: where other ranks have begun the backward of the first one, aborts that step.

    Where none has, as of a program that uses two forwards in one backward, all is as it was.
    """
    contract = root.contract
    if contract.is_broken:
        return
    if contract.history.predicts_nothing:
        if any(contract.directions(is_backward=False)):
            _forget_pass(root)
        return
    first, coming = contract.history.cycle[0].kind, coming_passes(contract.history)
    if not coming or any(unit.kept_unsharded or unit.backward_unobserved for unit in root.units):
        return  # They have to stay gathered.
    pending = [unit.pending_backwards for unit in root.units]
    is_aborted = _take_part_in_backward(root, coming)
    _forget_pass(root)
    if not is_aborted:
        contract.history.unpredictable.add(first)
        for unit, count in zip(root.units, pending, strict=True):
            unit.pending_backwards = count


def _forget_pass(root: UnitContext) -> None:
    root.contract.forget_passes()
    for unit in root.units:
        unit.discard()


def _take_part_in_backward(root: UnitContext, coming: list[Pass]) -> bool:
    """A forward begins where the last step had a backward: takes part in that, for ranks that have begun it.

    The loss of this rank may have raised an error, which torch passes to the user and to nobody else.

    Returns:
        Whether another rank has begun it; it raises a StepError there.
    """
    contract = root.contract
    contract.begin(coming[0].kind, new_step=False)
    for unit in root.units:
        for buffer in unit.buffers:
            buffer.contribute_zeros()
    reasons = _replay_all(root, coming, RuntimeError(SKIPPED_BACKWARD))
    return not all(SKIPPED_BACKWARD in reason for reason in reasons)


def _replay_all(root: UnitContext, rest: list[Pass], error: BaseException) -> list[str]:
    """Replays the rest of a cycle whose first pass has begun; returns every rank's error, as text."""
    contract = root.contract
    for number, left in enumerate(rest):
        if number:
            contract.begin(left.kind, new_step=left.new_step)
        _replay(root, left, None if number else contract.history.last_event)
        if number < len(rest) - 1:
            contract.end_unchecked()
    end_pass(contract, PassStatus(failed=True))
    return all_gather_failures(error, contract)


def precedes_update(root: UnitContext, event: Event) -> bool:
    """Whether an event is the first reduction of a pass in which an optimizer consumes gradients.

    All ranks compare their events there: at the end of the pass parameters have changed. All of them reduce the
    same units with the same optimizer, so they are here together.
    """
    if event.phase != "reduction" or not has_reduced_grad_hooks():
        return False
    if any(earlier.phase == "reduction" for earlier in root.contract.history.current.events):
        return False
    params = (param for unit in root.units for buffer in unit.buffers for param in buffer.sharded_params)
    return any(is_consumed_in_backward(param) for param in params)


def _remaining(root: UnitContext) -> list[Pass] | None:
    """The events that the others expect of this rank until all compare again; None if unknown."""
    return remaining_passes(root.contract.history)


def remaining_passes(history: History) -> list[Pass] | None:
    """The rest of the current cycle, if it goes on as the last one did."""
    if not history.is_open:
        return None
    begun = [*history.cycle, history.current]
    last_cycle = history.last_cycles.get(begun[0].kind, [])
    if len(last_cycle) < len(begun) or not history.is_settled(last_cycle[len(history.cycle) :]):
        return None
    lefts = [_rest_of(last, current, history.in_order) for last, current in zip(last_cycle, begun, strict=False)]
    left_now = lefts[-1]
    if left_now is None or any(left is None or left.log for left in lefts[:-1]):
        return None
    return [left_now, *last_cycle[len(begun) :]]


def coming_passes(history: History) -> list[Pass]:
    """Between passes: the rest of the current cycle, if the last one, equal so far, went on with a backward."""
    first = history.cycle[0].kind if history.cycle else None
    last_cycle = [] if first is None or first in history.unpredictable else history.last_cycles.get(first, [])
    num_begun = len(history.cycle)
    if len(last_cycle) <= num_begun or not last_cycle[num_begun].kind.phase.startswith("backward"):
        return []
    are_equal = all(
        last.kind == current.kind and last.events == current.events
        for last, current in zip(last_cycle, history.cycle, strict=False)
    )
    return last_cycle[num_begun:] if are_equal else []


def _rest_of(last: Pass, current: Pass, in_order: bool) -> Pass | None:
    """The rest of a pass that repeats `last`; None where it has begun in another way."""
    log = current.log if in_order else current.events
    same_order = log == (last.log if in_order else last.events)[: len(log)]
    left = list(last.log)
    for entry in current.log:
        if entry not in left:
            return None
        left.remove(entry)
    return Pass(last.kind, new_step=False, log=left) if same_order and current.kind == last.kind else None


def _start_last_event(root: UnitContext) -> None:
    """Runs all that the others wait for before they compare the next event."""
    event = root.contract.history.last_event
    if event is not None and event.phase == "reduction":
        _start_remaining(root.by_name[event.unit], "reduction")
        root.by_name[event.unit].finish_reductions()
    for unit in root.starting_gathers:
        _start_remaining(unit, "gather")
    if event is not None:
        _finish_event(root, event, keep_part=False)


def _replay(root: UnitContext, left: Pass, last: Event | None) -> None:
    """Runs the collectives of the rest of a pass, and computes nothing; `last` is the event that they begin after."""
    between = left.kind.phase.startswith("forward") and left.kind.grad
    for event, is_transfer in left.log:
        if is_transfer:
            _replay_transfer(root.by_name[event.unit.rpartition("#")[0]], event, keep_part=between)
            continue
        if last is not None:  # Its transfers have started.
            _finish_event(root, last, keep_part=between)
        last = event
        if event != END:
            root.contract.record(event, compares_all=precedes_update(root, event))
    if last is not None:
        _finish_event(root, last, keep_part=between)


def _replay_transfer(unit: Unit, transfer: Event, *, keep_part: bool) -> None:
    """Takes part in one buffer's recorded collective for the other ranks; `keep_part` as in `Unit.release`."""
    number = int(transfer.unit.rpartition("#")[2])
    buffer, limit = unit.buffers[number], unit.contract.limit_seconds
    with unit.contract.waiting(Event(transfer.phase, unit.name)):
        if transfer.phase == "gather":
            if buffer.state is State.SHARDED:
                unit.start("gather", number)
            if not buffer.gather_has_second_half:
                buffer.release(limit, keep_part=keep_part)
        elif transfer.phase == "replication":
            unit.log_replication(number)
            buffer.finish_reduction(limit)
        else:
            unit.start("reduction", number)
            buffer.wait_reduced(limit)


def _start_remaining(unit: Unit, phase: str) -> None:
    """Starts those collectives of the last event, a "gather" or a "reduction", that this rank has not started."""
    started = unit.contract.history.transfers
    for number, buffer in enumerate(unit.buffers):
        if unit.transfer(phase, number) not in started and (
            buffer.state is State.SHARDED if phase == "gather" else buffer.trains
        ):
            unit.start(phase, number)


def _finish_event(root: UnitContext, event: Event, *, keep_part: bool) -> None:
    """Joins the collectives that begin when the transfers of this event are waited for, if the others wait for them."""
    if event.phase == "reduction" and root.contract.checks_every_event:
        root.by_name[event.unit].finish_reductions()
    if event.phase in GATHERING_PHASES and event.unit in root.by_name:
        unit = root.by_name[event.unit]
        for owner in (*unit.shared_owners, unit):
            if any(buffer.gather_has_second_half for buffer in owner.buffers):
                owner.release(keep_part=keep_part)


def abort_message(root: UnitContext, reasons: Sequence[str]) -> str:
    """The text of an aborted step; `reasons` by rank, "" where a rank has not failed."""
    params = [param for unit in root.units for buffer in unit.buffers for param in buffer.sharded_params]
    left = "Parameters and optimizer state are as before it, and training can go on with the next batch."
    if any(is_consumed_in_backward(param) for param in params):
        left = (
            "An optimizer that updates during the backward pass (overlap_step=True) may have updated some of the "
            "parameters: load the last snapshot, or build it with overlap_step=False to be able to go on."
        )
    return format_abort(f"step {root.contract.step}", reasons, left)
