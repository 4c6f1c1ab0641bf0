"""What all ranks do alike: refuse what one of them refuses.

An optimizer checks the parameters that it is given, which are other ones on every rank; and ranks may read other files.
Where one of them raised alone, the others would go on, and wait for it in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from scale_core.contract import Contract
from scale_core.events import Event
from scale_core.exchange import exchange_text

T = TypeVar("T")


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
