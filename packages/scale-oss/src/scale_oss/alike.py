"""What one rank refuses, all ranks refuse: the others would go on, and wait for it in vain.

An optimizer checks the parameters that it is given, which are other ones on every rank; and ranks may read other files.
"""

from __future__ import annotations

from scale_core.contract import Contract
from scale_core.events import Event
from scale_core.exchange import exchange_text


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
