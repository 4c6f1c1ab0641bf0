"""full_tensor.py: full tensors of the shards of all ranks, also where some hold nothing, or not of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scale_core.comm.group import group_of
from scale_core.errors import ContractError
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.full_tensor import gather_full_param


@pytest.mark.ranks("num_ranks")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_of_any_size_become_whole_in_rank_order(num_ranks: int) -> None:
    group = group_of()
    axes, whole = (Axis(group, Placement.SHARD),), torch.arange(20.0).view(4, 5)
    cuts = [0, 1, 4, 5] if group.size == 3 else [0, 4, 5]
    mine = (cuts[group.rank], cuts[group.rank + 1])
    # A rank without any element, columns, and copies of rows that the last rank has as well.
    ends = [0, 0, 12, 20] if group.size == 3 else [0, 0, 20]
    elements = Shard("elements", (4, 5), ends[group.rank], ends[group.rank + 1], axes)
    columns = Shard.of_ranges("columns", (4, 5), (((0, 4),), (mine,)), axes)
    rows = (0, 2) if group.rank else (2, 4)
    copies = Shard.of_ranges("copies", (4, 5), ((rows,), ((0, 5),)), axes, counted=group.rank < 2)
    part = whole.view(-1)[elements.start : elements.stop]
    for shard, held in ((elements, part), (columns, whole[:, slice(*mine)]), (copies, whole[slice(*rows)])):
        assert torch.equal(gather_full_param(held.contiguous(), shard, group), whole)
    # What follows the name are ranks along another axis, which may not be these ranks' alike.
    assert torch.equal(gather_full_param(part, replace(elements, name=f"a@{group.rank}"), group), whole)
    with pytest.raises(ContractError, match=r"would gather different full parameters, by rank: a[01], a") as raised:
        gather_full_param(part, replace(elements, name=f"a{group.rank}"), group)
    assert "gather the same tensors in the same order, by state_dict() or full_tensor()" in str(raised.value)
