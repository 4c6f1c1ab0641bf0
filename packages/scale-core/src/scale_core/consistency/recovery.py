"""What ranks say to each other, and to the user, when one has failed in a pass and all of them give it up.

How the rank that has failed brings the others to the end of the pass is each technique's own; there they meet, and what
they say then is not.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Sequence
from typing import TypeVar

from scale_core.comm.control_plane import exchange_text
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event

T = TypeVar("T")


def tell(mine: T, contract: Contract) -> list[T]:
    """All ranks tell each other something that JSON can hold, at the end of a pass; returns what each said, by rank.

    Raises:
        ScaleDistributedError: A rank did something else, or can't be reached.
    """
    with contract.waiting(Event("the end", "")):
        texts = exchange_text(json.dumps(mine), contract.group, limit_seconds=contract.limit_seconds)
    return [json.loads(text) for text in texts]


def tell_reasons(error: BaseException | None, contract: Contract) -> list[str]:
    """All ranks tell each other what they have raised; "" of one that has not failed. By rank.

    Raises:
        ScaleDistributedError: As in `tell`.
    """
    return tell("" if error is None else as_told(error), contract)


def as_told(error: BaseException) -> str:
    """An error as the other ranks are told of it: with its traceback."""
    return "".join(traceback.format_exception(error)).rstrip()


def given_up(what: str, reasons: Sequence[str], what_now: str) -> str:
    """In words: who has failed, what is left of it, and what the first of them has raised.

    >>> print(given_up("step 3", ["", "ValueError: no such token"], "Nothing has changed."))
    step 3 was given up on all ranks, because rank 1 failed. Nothing has changed. What rank 1 raised:
      ValueError: no such token

    Args:
        what: The pass or step.
        reasons: By rank; "" of one that has not failed.
        what_now: How things stand, and what the user may do; sentences.
    """
    failed = [rank for rank, reason in enumerate(reasons) if reason]
    who = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {', '.join(map(str, failed))}"
    first = "\n".join(f"  {line}" for line in reasons[failed[0]].splitlines())
    return f"{what} was given up on all ranks, because {who} failed. {what_now} What rank {failed[0]} raised:\n{first}"
