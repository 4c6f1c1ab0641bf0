"""Tagged messages from rank to rank, of which the collectives are made where the transport has none as good.

A message carries a tag that says what it is for, so two ranks that are at different places never read each other's
data: they time out, and that can be caught and named. Collectives of torch match by their order alone.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from scale_core.group import Group
from scale_core.host_transport import group_for
from scale_core.pending import Work, begin

# Tags of the messages that belong to no unit: 0 for data, and from 1 on for records, by their length, because gloo ends
# the process when a message is longer than the buffer that waits for it. A unit's tags come from its name.
UNTAGGED = 0
"""The tag of data that belongs to no unit."""

LONGEST_RECORD = 1 << 20
"""The most integers that ranks tell each other at once."""

UNIT_TAGS = range(LONGEST_RECORD + 2, 1 << 31)
"""The tags that callers may choose from."""

HOST = torch.device("cpu")
"""Where messages are sent from and received."""


def peer_to_peer(group: Group, device: torch.device) -> bool:
    """Whether collectives are made of messages: on the host, where gloo moves them; CUDA has them natively."""
    return device.type == HOST.type and group.backend != "fake"


def peers(group: Group) -> list[int]:
    """The other ranks of the group."""
    return [rank for rank in range(group.size) if rank != group.rank]


def receive_all(group: Group, targets: dict[int, Tensor], tag: int) -> list[tuple[int | None, Work]]:
    """Starts to receive one message from each rank; always called before `send_all`.

    Gloo holds a message back until its receive is posted, and two ranks that both wait for a send before they post
    their receive would wait forever.
    """
    receive = group_for(HOST, group).recv
    return [begin(peer, partial(receive, [target], peer, tag)) for peer, target in targets.items() if target.numel()]


def send_all(group: Group, sources: dict[int, Tensor], tag: int) -> list[tuple[int | None, Work]]:
    """Starts to send each rank its message; one without elements is not sent, nor received."""
    send = group_for(HOST, group).send
    return [begin(peer, partial(send, [source], peer, tag)) for peer, source in sources.items() if source.numel()]
