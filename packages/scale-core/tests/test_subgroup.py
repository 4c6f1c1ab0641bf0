"""collectives.py: some ranks of a group make one of their own, however many groups each is in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from scale_core.comm.collectives import all_reduce
from scale_core.comm.group import group_of
from scale_core.comm.subgroups import subgroup_of
from scale_core.testing import run_ranks


def of_ranks_in_different_numbers_of_groups() -> list[tuple[int, ...]]:
    """Three of four ranks know of it, of which one is in two groups more and another in one."""
    made = dist.new_group([0, 1, 2])
    me = dist.get_rank()
    if me == 3:
        return []
    three = group_of(made)
    for _ in range({0: 2, 1: 0, 2: 1}[me]):
        dist.new_group([me], use_local_synchronization=True)
    found = []
    for ranks in ([0, 1], [1, 2], [0, 1, 2]):
        part = subgroup_of(three, ranks)
        total = all_reduce(torch.tensor([me + 1.0]), part).wait()
        assert total.item() == (sum(ranks) + len(ranks) if me in ranks else me + 1)
        found.append(part.ranks)
    return found


def test_ranks_in_different_numbers_of_groups_make_one() -> None:
    first, second, third, fourth = run_ranks(of_ranks_in_different_numbers_of_groups, 4)
    assert [first[0], first[2]] == [(0, 1), (0, 1, 2)] and len(first[1]) == 1
    assert second == [(0, 1), (1, 2), (0, 1, 2)]
    assert third[1:] == [(1, 2), (0, 1, 2)] and len(third[0]) == 1 and fourth == []


@pytest.mark.ranks(3)
def test_a_group_is_not_split_if_other_ranks_never_call() -> None:
    """Makes a group of two of three ranks as after `init_process_group(device_id=...)`; torch's splits are recorded."""
    asked: list[str] = []
    default: Any = dist.group.WORLD
    default.bound_device_id = torch.device("cpu", 0)
    original = dist.distributed_c10d._get_split_source

    def record(group: Any) -> Any:
        asked.append("split")
        return None

    dist.distributed_c10d._get_split_source = record  # type: ignore[assignment]
    try:
        part = subgroup_of(group_of(), (0, 1))
    finally:
        dist.distributed_c10d._get_split_source = original
    if part.size == 2:
        total = torch.tensor([1.0])
        all_reduce(total, part).wait()
        assert total.item() == 2.0
    assert default.bound_device_id == torch.device("cpu", 0)
    assert asked == []
