"""Numbers that all ranks give to one thing, so that messages of two things alike are never taken for each other."""

from __future__ import annotations

from scale_core.contract import Contract
from scale_core.events import Event
from scale_core.exchange import exchange

_next_number = 0


def next_number(what: str, contract: Contract) -> int:
    """Returns a number that no rank of the group has given to anything yet; all ranks call it together.

    Args:
        what: What is to be numbered, for those who wait in vain.
        contract: What the ranks have promised each other.

    Raises:
        ScaleDistributedError: A rank did something else.
    """
    global _next_number  # Each rank may have made others of the kind in other groups.
    with contract.waiting(Event(what, "")):
        rows = exchange([_next_number], contract.group, limit_seconds=contract.limit_seconds)
    number = max(row[0] for row in rows)
    _next_number = number + 1
    return number
