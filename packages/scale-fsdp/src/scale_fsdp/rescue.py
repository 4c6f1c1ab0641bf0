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
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from scale_core.contract import ScaleDistributedError, StepError
from scale_core.events import END
from scale_core.history import Pass
from scale_fsdp.arriving import uses_gradients_at_once

if TYPE_CHECKING:  # unit.py stands on this file's user, root.py.
    from scale_fsdp.root import Root


class Notes(NamedTuple):
    """What a rank tells the others when they compare a pass, beside what it ran.

    Attributes:
        num_late: How many units have got gradients after their reduction.
        num_unused: How many parameters it has reduced as zeros, since it had no gradient for them.
        failed: It has failed in this pass, and has served the others to its end.
    """

    num_late: int = 0
    num_unused: int = 0
    failed: int = False


def can_give_up(root: Root) -> bool:
    """Whether an error that is raised here and now comes to an end on all ranks."""
    return root.contract.alone or _rest(root) is not None


def give_up_together(root: Root, error: BaseException) -> bool:
    """Serves the other ranks to the end of the cycle of passes that runs now, and tells them that this one failed.

    Returns:
        Whether it could: the order of what is left is known, and the ranks have not lost each other.

    Raises:
        ScaleDistributedError: The others did something else, or can't be reached.
    """
    if isinstance(error, StepError) or error is root.told:
        return True
    contract, rest = root.contract, _rest(root)
    if rest is None or contract.alone or contract.is_broken or isinstance(error, ScaleDistributedError):
        return False
    for unit in root.units:
        unit.withhold_gradients()
        unit.end_transfers()
    for number, left in enumerate(rest):
        if number:
            contract.begin(left.kind, new_step=left.new_step)
        _serve(root, left)
        if number < len(rest) - 1:
            contract.leave()
    root.close(Notes(failed=True))
    reasons = tell_reasons(root, error)
    error.add_note(_in_words(root, reasons))
    return True


def raise_if_given_up(root: Root, notes: Sequence[Notes], error: BaseException | None) -> None:
    """At the end of a cycle of passes: raises on this rank if one has said that it failed.

    Args:
        root: Of the model.
        notes: What each rank has said.
        error: Why this one has failed; None if it has not.

    Raises:
        StepError: Another one has; if this one has, its own error.
    """
    if not any(told.failed for told in notes):
        return
    if error is not None and root.contract.alone:
        raise error
    words = _in_words(root, tell_reasons(root, error))
    if error is None:
        raise StepError(words, step=root.contract.step)
    error.add_note(words)
    root.told = error
    raise error


def tell_reasons(root: Root, error: BaseException | None) -> list[str]:
    """All ranks tell each other why they failed; "" of one that did not."""
    if error is None:
        return root.tell("")
    return root.tell("".join(traceback.format_exception(error)).rstrip())


class EndOfBackward:
    """Called by autograd when a backward pass has ended, and dropped without a call where it has failed."""

    def __init__(self, root: Root) -> None:
        self._root: Root | None = root

    def __call__(self) -> None:
        root, self._root = self._root, None
        if root is not None:
            root.finish_backward()

    def __del__(self) -> None:
        if self._root is not None:
            # What the user is about to see is the error of the pass; that the others can't be reached either, the next
            # pass says.
            with suppress(Exception):
                self._root.backward_has_failed()


def _rest(root: Root) -> list[Pass] | None:
    """What the others expect of this rank until all compare again; None where that can't be foretold."""
    return root.contract.history.rest(in_order=root.contract.group.backend != "gloo")


def _serve(root: Root, left: Pass) -> None:
    """Does what the others need of this rank in the rest of a pass, and computes nothing."""
    between = left.kind.phase.startswith("forward") and left.kind.grad
    for event, is_transfer in left.log:
        if not is_transfer:
            if event != END:
                root.contract.announce(event)
            continue
        root.by_name[event.unit.rpartition("#")[0]].serve(event, keep_part=between)


def _in_words(root: Root, reasons: Sequence[str]) -> str:
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    who = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    first = "\n".join(f"  {line}" for line in reasons[failed[0]].splitlines())
    if uses_gradients_at_once(root.units):
        left = (
            "An optimizer that updates during the backward pass (overlap_step=True) may have updated some of the "
            "parameters: load the last snapshot, or build it with overlap_step=False to be able to go on."
        )
    else:
        left = "Parameters and optimizer state are as before it, and training can go on with the next batch."
    return (
        f"step {root.contract.step} was given up on all ranks, because {who} failed. {left} "
        f"What rank {failed[0]} raised:\n{first}"
    )
