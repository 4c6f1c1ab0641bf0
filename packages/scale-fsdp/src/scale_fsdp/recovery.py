"""What happens when one rank fails in the middle of a step: all ranks give the step up together, and can go on.

A rank that raises alone leaves the others waiting for its shards. But what they are waiting for is known, since every
step is like the last one: so the rank that has failed serves the rest of that order, with its shards and with zeros for
its gradients, and says at the end that it has failed. Then every rank raises, no optimizer has stepped, and what was
reduced in this step is thrown away. In the first step the order can't be foretold, but there all ranks compare each
event: the rank that has failed comes to the next comparison and says so. Where neither is so, as in the third
micro-batch of the first step, it leaves its last words in the store, and the others raise when their wait ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from scale_core.autograd_hooks import used_at_once
from scale_core.consistency.contract import ScaleDistributedError, StepError
from scale_core.consistency.execution_order import END, Pass
from scale_core.consistency.recovery import as_told, given_up, tell_reasons
from scale_fsdp.unit import Unit, UnitContext


class PassStatus(NamedTuple):
    """What a rank tells the others when they compare a pass, beside what it ran.

    Attributes:
        num_late: How many units have got gradients after their reduction.
        num_unused: How many parameters it has reduced as zeros, since it had no gradient for them.
        failed: It has failed in this pass, and has served the others to its end.
    """

    num_late: int = 0
    num_unused: int = 0
    failed: int = False


def can_abort(root: UnitContext) -> bool:
    """Whether an error that is raised here and now comes to an end on all ranks."""
    return root.contract.alone or root.contract.compares_all or _remaining(root) is not None


def abort_on_all_ranks(root: UnitContext, error: BaseException) -> bool:
    """Serves the other ranks to the end of the cycle of passes that runs now, and tells them that this one failed.

    Returns:
        Whether it could: the order of what is left is known, and the ranks have not lost each other.

    Raises:
        ScaleDistributedError: The others did something else, or can't be reached.
    """
    if isinstance(error, StepError) or error is root.shared_error:
        return True
    contract, rest = root.contract, _remaining(root)
    if contract.alone or contract.is_broken or isinstance(error, ScaleDistributedError):
        return False
    if rest is None and not contract.compares_all:
        return False
    for unit in root.units:
        unit.withhold_gradients()
    if rest is None:
        _start_last_event(root)
        error.add_note(contract.give_up(as_told(error)))
        return True
    for unit in root.units:
        unit.end_transfers()
    for number, left in enumerate(rest):
        if number:
            contract.begin(left.kind, new_step=left.new_step)
        _replay(root, left)
        if number < len(rest) - 1:
            contract.leave()
    contract.close(*PassStatus(failed=True))
    error.add_note(abort_message(root, tell_reasons(error, contract)))
    return True


def raise_aborted(root: UnitContext, error: BaseException | None) -> NoReturn:
    """At the end of a cycle of passes, where a rank has said that it failed: raises on this one.

    Args:
        root: Of the model.
        error: Why this one has failed; None if it has not.

    Raises:
        StepError: Another one has; if this one has, its own error.
    """
    if error is not None and root.contract.alone:
        raise error
    words = abort_message(root, tell_reasons(error, root.contract))
    if error is None:
        raise StepError(words, step=root.contract.step)
    error.add_note(words)
    root.shared_error = error
    raise error


def _remaining(root: UnitContext) -> list[Pass] | None:
    """What the others expect of this rank until all compare again; None where that can't be foretold."""
    return root.contract.history.rest(in_order=root.contract.group.backend != "gloo")


def _start_last_event(root: UnitContext) -> None:
    """Has all under way that the others wait for before they compare the next event."""
    event = root.contract.history.last_event
    if event is not None and event.phase == "reduction":
        root.by_name[event.unit].start_remaining("reduction")
    for unit in root.starting_gathers:
        unit.start_remaining("gather")


def _replay(root: UnitContext, left: Pass) -> None:
    """Does what the others need of this rank in the rest of a pass, and computes nothing."""
    between = left.kind.phase.startswith("forward") and left.kind.grad
    for event, is_transfer in left.log:
        if not is_transfer:
            if event != END:
                root.contract.announce(event)
            continue
        root.by_name[event.unit.rpartition("#")[0]].replay(event, keep_part=between)


def abort_message(root: UnitContext, reasons: Sequence[str]) -> str:
    """That the step was given up, and why, given what each rank has raised, by rank; "" where it has not."""
    left = "Parameters and optimizer state are as before it, and training can go on with the next batch."
    if _uses_gradients_at_once(root.units):
        left = (
            "An optimizer that updates during the backward pass (overlap_step=True) may have updated some of the "
            "parameters: load the last snapshot, or build it with overlap_step=False to be able to go on."
        )
    return given_up(f"step {root.contract.step}", reasons, left)


def _uses_gradients_at_once(units: Sequence[Unit]) -> bool:
    """Whether somebody uses gradients of these units up before a pass is over, so that it can't be taken back."""
    return any(used_at_once(param) for unit in units for buffer in unit.buffers for param in buffer.exposed)
