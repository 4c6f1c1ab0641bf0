"""full_tensor.py: whole tensors of the shards of all ranks, also where some hold nothing, or not of all."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from scale_core.comm.group import Group, group_of
from scale_core.consistency.contract import ContractError
from scale_core.shard import Axis, Placement, Shard
from scale_core.state.chunks import LocalShard
from scale_core.state.full_tensor import ParamState, gather_full_param, gather_states
from scale_core.testing import run_ranks

HOST = torch.device("cpu")


def slots(name: str, shape: tuple[int, ...], cuts: list[int], group: Group, **values: torch.Tensor) -> ParamState:
    """What this rank has of a parameter that is cut there, of states that are given whole."""
    start, stop = cuts[group.rank], cuts[group.rank + 1]
    shard = Shard(name, shape, start, stop, (Axis(group, Placement.SHARD),))
    pieces = {key: LocalShard(whole.view(-1)[start:stop].clone(), shape, start, stop) for key, whole in values.items()}
    return ParamState(shard, HOST, {"step": torch.tensor(3.0), **pieces})


def make_whole() -> None:
    group = group_of()
    matrix, count = torch.arange(6.0).view(2, 3), torch.arange(4, dtype=torch.int64)
    cuts = [0, 1, 5, 6] if group.size == 3 else [0, 5, 6]
    ends = [0, 0, 4, 4] if group.size == 3 else [0, 0, 4]
    here = [slots("a", (2, 3), cuts, group, sum=matrix, half=matrix.bfloat16()), slots("b", (4,), ends, group, n=count)]
    if ends[group.rank] == ends[group.rank + 1]:
        here[1] = here[1]._replace(values={})  # It holds nothing of b, and may never have made a state of it.
    a, b = gather_states(here)
    assert torch.equal(a["sum"], matrix) and torch.equal(a["half"], matrix.bfloat16()) and a["step"] == 3
    assert torch.equal(b["n"], count) and b["n"].dtype == torch.int64
    kept, _ = gather_states(here, keeps=group.rank == 0, on_host=True)
    assert isinstance(kept["sum"], LocalShard) is (group.rank != 0)
    of_some_indices(group)
    with pytest.raises(ContractError, match=r"would make different parameters whole, by rank: a[01], a") as raised:
        shard = here[0].shard
        gather_full_param(torch.zeros(shard.stop - shard.start), replace(shard, name=f"a{group.rank}"), group)
    assert "call state_dict() of the same module together" in str(raised.value)
    part = matrix.view(-1)[shard.start : shard.stop]
    # What follows the name are ranks along another axis, which may not be these ranks' alike.
    assert torch.equal(gather_full_param(part, replace(shard, name=f"a@{group.rank}"), group), matrix)
    # Whoever holds no shard of anything takes no part.
    alone = gather_states([slots("c", (3,), [0, 3], Group(), sum=torch.ones(3))])
    assert torch.equal(alone[0]["sum"], torch.ones(3))
    assert gather_states([]) == []


def of_some_indices(group: Group) -> None:
    """Columns, and copies of rows that the last rank has as well."""
    axes, whole = (Axis(group, Placement.SHARD),), torch.arange(20.0).view(4, 5)
    cuts = [0, 1, 4, 5] if group.size == 3 else [0, 4, 5]
    mine = (cuts[group.rank], cuts[group.rank + 1])
    columns = Shard.of_ranges("columns", (4, 5), (((0, 4),), (mine,)), axes)
    rows = (0, 2) if group.rank else (2, 4)
    copies = Shard.of_ranges("copies", (4, 5), ((rows,), ((0, 5),)), axes, counted=group.rank < 2)
    here = []
    for shard, part in ((columns, whole[:, slice(*mine)]), (copies, whole[slice(*rows)])):
        state = LocalShard(part.contiguous(), (4, 5), shard.start, shard.stop, shard.ranges)
        here.append(ParamState(shard, HOST, {"sum": state}))
    for found in gather_states(here):
        assert torch.equal(found["sum"], whole)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_shards_of_any_size_become_whole_in_rank_order(num_ranks: int) -> None:
    run_ranks(make_whole, num_ranks)


def differ_in_what_they_have() -> list[str]:
    group, said = group_of(), []
    more = {"sum": torch.ones(4), "extra": torch.ones(4)} if group.rank else {"sum": torch.ones(4)}
    for here in (
        [slots("a", (4,), [0, 2, 4], group, **more)],
        [slots("ab"[group.rank], (4,), [0, 2, 4], group, sum=torch.ones(4))],
    ):
        with pytest.raises(RuntimeError, match="all ranks must step together") as caught:
            gather_states(here)
        said.append(str(caught.value))
    return said


def test_ranks_that_have_stepped_otherwise_are_told_on_all_of_them() -> None:
    for said in run_ranks(differ_in_what_they_have, 2):
        assert said[0].startswith(
            "the ranks have other state of 'a': ['extra', 'sum'] on some, ['sum'] of 'a' on rank 0"
        )
        assert said[1].startswith("the ranks have other state of ")


def test_what_is_cut_along_two_axes_is_refused() -> None:
    axes = (Axis(Group(0, 2), Placement.SHARD), Axis(Group(0, 3), Placement.SHARD))
    with pytest.raises(RuntimeError, match=r"'a' is cut along 2 axes .*sharded_state_dict\(model, optimizer\)"):
        gather_states([ParamState(Shard("a", (6,), 0, 1, axes), HOST, {})])
