"""What all ranks do alike: refuse what one of them refuses, and call a thing by one number.

An optimizer checks the parameters that it is given, which are other ones on every rank; and ranks may read other files.
Where one of them raised alone, the others would go on, and wait for it in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from scale_core.contract import Contract
from scale_core.events import Event
from scale_core.exchange import exchange, exchange_text

T = TypeVar("T")

_next_number = 0


def do_alike(act: Callable[[], T], what: str, contract: Contract) -> T:
    """Does what this rank may refuse, for itself; raises on every rank if one does. All ranks call it together.

    Args:
        act: Called once; returns what this returns.
        what: As in `refuse_alike`.
        contract: As in `refuse_alike`.

    Raises:
        Exception: What `act` has raised; or `ValueError`, with the words of the first rank where it has.
        ScaleDistributedError: A rank did something else.
    """
    done: list[T] = []
    refusal = None
    try:
        done.append(act())
    except Exception as error:
        refusal = error
    refuse_alike(refusal, what, contract)
    return done[0]


def refuse_alike(refusal: Exception | None, what: str, contract: Contract, error: type[Exception] = ValueError) -> None:
    """Raises on every rank if one has something to refuse; all ranks call it together.

    Args:
        refusal: What this rank has to raise.
        what: What the ranks are doing, for those who wait in vain.
        contract: What they have promised each other.
        error: What the others raise.

    Raises:
        Exception: `refusal`; or `error`, with the words of the first rank that refuses.
        ScaleDistributedError: A rank did something else.
    """
    words = "" if refusal is None else f"{type(refusal).__name__}: {refusal}"
    with contract.waiting(Event(what, "")):
        texts = exchange_text(words, contract.group, limit_seconds=contract.limit_seconds)
    if refusal is not None:
        raise refusal
    for rank, text in enumerate(texts):
        if text:
            raise error(f"{text} (on rank {rank})")


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
