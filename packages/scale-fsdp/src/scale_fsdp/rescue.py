"""What happens when one rank fails in the middle of a step: all ranks give the step up together, and can go on.

A rank that raises alone leaves the others waiting for its shards. But what they are waiting for is known, since every
step is like the last one: so the rank that has failed serves the rest of that order, with its shards and with zeros for
its gradients, and says at the end that it has failed. Then every rank raises, no optimizer has stepped, and what was
reduced in this step is thrown away. Where the order can't be foretold, as in the first step, it leaves its last words
in the store, and the others raise when their wait ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scale_core.contract import ScaleDistributedError
from scale_core.events import END
from scale_core.history import Pass

if TYPE_CHECKING:  # unit.py stands on this file's user, root.py.
    from scale_fsdp.root import Root


class StepError(ScaleDistributedError):
    """Another rank failed in this step, so all ranks gave it up; a rank that failed itself raises its own error.

    Parameters, gradients of earlier backward passes and the optimizer's state are as they were before the step, but for
    gradients that were accumulated under `no_sync()`: these are dropped with it. Training can go on.
    """


def give_up_together(root: Root, error: BaseException) -> bool:
    """Serves the other ranks to the end of the cycle of passes that runs now, and tells them that this one failed.

    Returns:
        Whether it could: the order of what is left is known, and the ranks have not lost each other.

    Raises:
        ScaleDistributedError: The others did something else, or can't be reached.
    """
    if isinstance(error, StepError):
        return True  # All ranks know.
    contract = root.contract
    rest = contract.history.rest(in_order=contract.group.backend != "gloo")
    if rest is None or contract.alone or contract.is_broken or isinstance(error, ScaleDistributedError):
        return False
    for unit in root.units:
        if rest[-1].kind.grad:  # The others keep what they have when an evaluation is given up.
            unit.drop_gradients()
        unit.end_transfers()
    for number, left in enumerate(rest):
        if number:
            contract.begin(left.kind, new_step=left.new_step)
        _serve(root, left)
        if number < len(rest) - 1:
            contract.leave()
    contract.close(0, 0, 1)
    reasons = tell_reasons(root, error)
    error.add_note(_in_words(contract.step, reasons))
    return True


def raise_if_given_up(root: Root, failed: Sequence[int]) -> None:
    """At the end of a cycle of passes: raises on this rank if another one has said that it failed.

    Raises:
        StepError: One has.
    """
    if any(failed):
        raise StepError(_in_words(root.contract.step, tell_reasons(root, None)), step=root.contract.step)


def tell_reasons(root: Root, error: BaseException | None) -> list[str]:
    """All ranks tell each other why they failed; "" of one that did not."""
    if error is None:
        return root.tell("")
    return root.tell("".join(traceback.format_exception(error)).rstrip())


def _serve(root: Root, left: Pass) -> None:
    """Does what the others need of this rank in the rest of a pass, and computes nothing."""
    between = left.kind.phase.startswith("forward") and left.kind.grad
    for event, is_transfer in left.log:
        if not is_transfer:
            if event != END:
                root.contract.announce(event)
            continue
        unit = root.by_name[event.unit]
        if event.phase == "gather":
            unit.gather()
            unit.release(keep_part=between)
        else:
            root.start_reduction(unit)
    root.make_room()


def _in_words(step: int, reasons: Sequence[str]) -> str:
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    who = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    first = "\n".join(f"  {line}" for line in reasons[failed[0]].splitlines())
    return (
        f"step {step} was given up on all ranks, because {who} failed. Parameters and optimizer state are as before "
        f"it, and training can go on with the next batch. What rank {failed[0]} raised:\n{first}"
    )
