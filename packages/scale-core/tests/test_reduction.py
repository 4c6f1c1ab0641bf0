"""gradient.py: from flat gradients to this rank's shard of their average, kept aside until it is asked for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scale_core.comm.group import Group, group_of
from scale_core.device.streams import Stream
from scale_core.flat.config import ShardGroups
from scale_core.flat.gradient import PlainReduceScatter, Reduction

CPU = torch.device("cpu")


def make(group: Group, replicas: Group | None = None, dtype: torch.dtype = torch.float32) -> Reduction:
    return Reduction(PlainReduceScatter(ShardGroups(group, replicas or Group())), dtype, CPU, Stream())


def flat(rank: int, size: int) -> Tensor:
    return torch.arange(3.0 * size) + 100 * rank


def part(group: Group, summed_over: list[int], divisor: int) -> Tensor:
    total = sum((flat(rank, group.size) for rank in summed_over), torch.zeros(3 * group.size))
    return total[3 * group.rank : 3 * (group.rank + 1)] / divisor


@pytest.mark.ranks(1, 3)
def test_results_wait_in_the_order_in_which_they_were_started() -> None:
    group = group_of()
    reduction = make(group)
    assert reduction.results() == []
    everyone = list(range(group.size))
    for tag in (1 << 21, 1 << 22):
        reduction.start(flat(group.rank, group.size), tag)
        reduction.wait()
    reduction.start(flat(group.rank, group.size), divisor=1)
    first, second, third = reduction.results()
    assert torch.equal(first, part(group, everyone, group.size)) and torch.equal(first, second)
    assert torch.equal(third, part(group, everyone, 1))
    assert reduction.results() == []
    reduction.start(flat(group.rank, group.size))
    with pytest.raises(AssertionError, match="under way already"):
        reduction.start(flat(group.rank, group.size))
    reduction.cancel()
    assert reduction.results() == []


@pytest.mark.ranks(4)
def test_averages_of_a_copy_are_averaged_over_the_copies() -> None:
    """Ranks 0 and 1 share a copy, as do 2 and 3."""
    world = group_of()
    everyone = [torch.distributed.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    group = group_of(everyone[world.rank // 2])
    reduction = make(group, group_of(everyone[2 + world.rank % 2]))
    for divisor in (None, 3):
        reduction.start(torch.arange(6.0) + 100 * world.rank, divisor=divisor)
        reduction.wait()
        (reduced,) = reduction.results()
        total = (4 * torch.arange(6.0) + 600)[3 * group.rank : 3 * (group.rank + 1)]
        assert torch.allclose(reduced, total / (divisor or 4), rtol=1e-6)


def test_results_are_rounded_to_the_dtype_of_the_shard_once() -> None:
    reduction = make(Group(), dtype=torch.bfloat16)
    reduction.start(torch.tensor([1.0 + 2**-12]))
    (reduced,) = reduction.results()
    assert reduced.dtype == torch.bfloat16


def test_results_are_brought_to_where_they_wait() -> None:
    reduction = Reduction(PlainReduceScatter(ShardGroups()), torch.float32, torch.device("meta"), Stream())
    reduction.start(torch.ones(3))
    (reduced,) = reduction.results()
    assert reduced.device.type == "meta"
