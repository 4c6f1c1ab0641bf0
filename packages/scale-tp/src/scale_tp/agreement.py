"""Ranks that call one thing with other sizes learn of it, in place of mixing their data or ending in the transport.

Ranks say what they are about to do the first time that they do it; later calls that are alike cost nothing. The
messages of each call carry a tag that is made of the same words, so that ranks that differ later wait in vain, and
never read each other's data.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch.distributed as dist

from scale_core.events import Event, identity, message_tag
from scale_core.exchange import exchange, exchange_text
from scale_core.group import Group

_agreed: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()


def agree(what: str, words: str, group: Group) -> int:
    """Returns the tag of the messages of a call, which all ranks of the group are about to make alike.

    Args:
        what: What is called, such as "ring_attention".
        words: All that has to be the same on all ranks: shapes of what is sent, dtypes, options.
        group: The ranks that take part.

    Raises:
        TransferError: A rank did not come.
        ValueError: On all ranks: they say different things.
    """
    tag = message_tag(Event(what, words))
    if group.process_group is None or group.backend == "fake":
        return tag
    known = _agreed.setdefault(group.process_group, set())
    mine = identity(what, words)
    if mine not in known:
        if len({row[0] for row in exchange([mine], group)}) > 1:
            told = exchange_text(f"{what}: {words}", group)
            by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
            raise ValueError(f"the ranks are about to do different things: {by_rank}: call it alike on all of them")
        known.add(mine)
    return tag
