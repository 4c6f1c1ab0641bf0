"""collectives.py: a user's point-to-point messages and ours are never taken for each other, whatever the tags."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import UNIT_TAGS, all_gather, exchange, exchange_text, reduce_scatter
from scale_core.comm.group import group_of

UNIT_TAG = UNIT_TAGS[17]
TAGS = [*range(20), 2**20, UNIT_TAGS.start, UNIT_TAG, UNIT_TAG + 1, 2**31 - 1]


@pytest.mark.ranks(3)
def test_messages_of_any_tag_may_be_in_flight_around_ours() -> None:
    group, ranks = group_of(), range(dist.get_world_size())
    others = [rank for rank in ranks if rank != group.rank]
    sent = {tag: torch.arange(3.0) + (tag % 1000) + group.rank for tag in TAGS}
    sends = [dist.isend(sent[tag], other, tag=tag) for tag in TAGS for other in others]
    total = torch.tensor([group.rank + 1.0])
    reduction = dist.all_reduce(total, async_op=True)
    for length in range(20):
        assert exchange([group.rank] * length, group) == [[rank] * length for rank in ranks]
    assert exchange_text("word" * group.rank, group) == ["word" * rank for rank in ranks]
    for tag in (0, 1, UNIT_TAG):
        own, numbers = torch.tensor([group.rank + 1.0]), [rank + 1.0 for rank in ranks]
        assert all_gather(torch.empty(group.size), own, group, tag=tag).wait().tolist() == numbers
        assert reduce_scatter(own.repeat(group.size), group, average=False, tag=tag).wait().item() == sum(numbers)
        assert all_to_all(torch.empty(group.size), own.repeat(group.size), group, tag=tag).wait().tolist() == numbers
    for tag in reversed(TAGS):
        for other in others:
            received = torch.empty(3)
            dist.recv(received, other, tag=tag)
            assert torch.equal(received, torch.arange(3.0) + (tag % 1000) + other)
    for send in sends:
        send.wait()
    reduction.wait()
    assert total.item() == sum(rank + 1 for rank in ranks)
