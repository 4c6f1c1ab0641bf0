"""One comparison of a call between ranks: shapes, dtypes and options that have to be the same on all of them."""

from __future__ import annotations

from scale_core.comm.collectives import exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.consistency.execution_order import Event, fingerprint_of, message_tag


def check_same_call(what: str, signature: str, group: Group, *, each_time: bool = False) -> int:
    """Returns the message tag of a call whose signature (shapes, dtypes, options) has to be the same on all ranks.

    A call that was compared once costs nothing later. Its messages carry the same tag, so that ranks which differ later
    time out and never read each other's data.

    Args:
        what: What is called.
        signature: What has to be the same.
        group: The ranks that call it together.
        each_time: Compare it also where it was equal before, for calls whose messages do not carry the tag.

    Raises:
        TransferError: A rank did not come.
        ValueError: On all ranks: they differ.
    """
    tag = message_tag(Event(what, signature))
    if group.process_group is None or group.backend == "fake":
        return tag
    known, own = group.state.compared_calls, fingerprint_of(what, signature)
    if each_time or own not in known:
        if len({row[0] for row in exchange([own], group)}) > 1:
            texts = exchange_text(f"{what}: {signature}", group)
            by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ValueError(f"the ranks are about to do different things: {by_rank}: call it alike on all of them")
        known.add(own)
    return tag
