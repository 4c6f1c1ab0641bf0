"""mesh.py: sizes and ranks of axes as integers, and the groups and meshes that are made of them."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist

from scale_core import Group, ParallelDims, group_of
from scale_core.comm.collectives import all_reduce
from scale_core.comm.mesh import AXES, rank_groups

SIZES = [
    {"dp_replicate": replicas, "dp_shard": shard, "cp": cp, "tp": tp, "pp": pp, "ep": ep}
    for replicas, shard, cp, tp, pp in itertools.product((1, 2, 3), (1, 2, 4), (1, 2), (1, 2), (1, 3))
    for ep in (1, 2, 4, 8)
    if shard * cp % ep == 0
]


def test_the_last_axis_runs_fastest_and_the_first_slowest() -> None:
    sizes = {"data": 2, "pipeline": 2, "context": 2, "model": 2}
    for axis, groups in {
        "model": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
        "context": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        "data": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    }.items():
        assert rank_groups(sizes, axis) == groups
    assert rank_groups(sizes, "data", "context") == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_every_rank_is_in_one_group_of_each_axis(sizes: dict[str, int]) -> None:
    world = math.prod(size for name, size in sizes.items() if name != "ep")
    dims = ParallelDims(**{**sizes, "dp_shard": -1}, world_size=world)
    assert dims == ParallelDims(**sizes)
    assert dims.world_size == world
    for axis in AXES:
        groups = dims.ranks(axis)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {dims.size(axis)}
        assert all(group == sorted(group) for group in groups)
    fsdp = dims.size("fsdp")
    assert (fsdp, dims.size("efsdp") * dims.ep) == (sizes["dp_shard"] * sizes["cp"], fsdp)
    assert dims.size("edp") * dims.ep == dims.size("loss") == dims.size("batch") * dims.cp
    if dims.ep == 1:
        assert dims.ranks("edp") == dims.ranks("loss")


@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "-".join(map(str, sizes.values())))
def test_two_ranks_share_one_group_of_two_crossing_axes(sizes: dict[str, int]) -> None:
    dims = ParallelDims(**sizes)
    crossing = [("pp", "dp_replicate", "fsdp", "tp"), ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    for axes in (*crossing, ("pp", "dp_replicate", "efsdp", "ep", "tp"), ("pp", "batch", "cp", "tp")):
        assert dims.ranks(*axes) == [list(range(dims.world_size))]
        for first, second in itertools.combinations(axes, 2):
            for one, other in itertools.product(dims.ranks(first), dims.ranks(second)):
                assert len(set(one) & set(other)) <= 1
    # The ranks with the same experts and the ranks that divide them are parts of the ranks that shard the rest.
    for part in (*dims.ranks("ep"), *dims.ranks("efsdp")):
        assert any(set(part) <= set(ranks) for ranks in dims.ranks("fsdp"))


def test_ranks_stand_in_the_order_of_torchtitan() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2, pp=2)
    assert dims.ranks("tp")[0] == [0, 1]
    assert dims.ranks("dp_shard")[0] == [0, 2]
    assert dims.ranks("dp_replicate")[0] == [0, 4]
    assert dims.ranks("pp")[0] == [0, 8]
    assert ParallelDims(cp=2, tp=2, world_size=8).ranks("cp")[0] == [0, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp": 3, "world_size": 8}, r"expected tp=3 to divide the number of ranks, got 8 ranks: start 3 ranks, or ch"),
        ({"pp": 2, "tp": 3, "world_size": 8}, r"expected tp=3 x pp=2 = 6 to divide|expected pp=2 x tp=3 = 6 to divide"),
        ({"dp_shard": 2, "tp": 2, "world_size": 8}, r"dp_shard=2 x tp=2 = 4 to be .*, got 8 ranks: .* leave dp_shard"),
        ({"dp_shard": 3, "tp": 3, "world_size": 8}, r"dp_shard=3 x tp=3 = 9 to be .* choose sizes whose product is"),
        ({"ep": 3, "cp": 2, "world_size": 8}, r"ep to divide dp_shard 4 x cp 2 = 8, .* got 3: take 1 or 2 or 4 or 8"),
        ({"tp": 0}, r"expected tp to be 1 or more, got 0"),
        ({"tp": -1}, r"expected tp to be 1 or more, got -1"),
        ({"dp_shard": 0}, r"expected dp_shard to be -1, or 1 or more, got 0"),
    ],
)
def test_sizes_that_do_not_fit_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(**arguments)


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("tensor",), r"no axis 'tensor'"),
        (("efsd",), r"no axis 'efsd': did you mean 'efsdp'"),
        (("fsdp", "ep"), r"fsdp, ep have ranks in common"),
        (("fsdp", "cp"), r"fsdp, cp have ranks in common"),
    ],
)
def test_axes_that_do_not_fit_are_named(axes: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelDims(world_size=8).ranks(*axes)


def test_a_size_is_an_integer() -> None:
    wrong: Any = "2"
    with pytest.raises(TypeError, match="expected tp to be an integer, got '2'"):
        ParallelDims(tp=wrong)


def test_without_a_process_group_the_launcher_says_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ParallelDims() == ParallelDims(dp_shard=1, world_size=1)
    assert ParallelDims(dp_shard=2, tp=2).world_size == 4  # a description only
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ParallelDims(tp=2).dp_shard == 4


def test_without_torch_distributed_one_rank_is_alone() -> None:
    assert all(group_of(ParallelDims(), axis) == Group() for axis in AXES)
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized: call scale_core\.launch"):
        group_of(ParallelDims(tp=2), "tp")
    with pytest.raises(RuntimeError, match=r"torch\.distributed is not initialized"):
        ParallelDims().get_mesh("tp")


@pytest.mark.ranks(4)
def test_groups_have_the_ranks_that_the_integers_say() -> None:
    rank = dist.get_rank()
    for dims in (
        ParallelDims(),
        ParallelDims(tp=2),
        ParallelDims(dp_replicate=2, tp=2),
        ParallelDims(dp_replicate=2, ep=2),
        ParallelDims(pp=2, cp=2, ep=2),
        ParallelDims(tp=4),
    ):
        for axis in AXES:
            group = group_of(dims, axis)
            expected = next(ranks for ranks in dims.ranks(axis) if rank in ranks)
            assert group == Group() if len(expected) == 1 else group.ranks == tuple(expected)
        assert group_of(dims) == group_of()
        assert group_of(copy.deepcopy(dims), "fsdp") == group_of(pickle.loads(pickle.dumps(dims)), "fsdp")


@pytest.mark.ranks(4)
def test_equal_partitions_are_one_process_group() -> None:
    before = len(dist.distributed_c10d._world.pg_map)
    first = group_of(ParallelDims(tp=2), "fsdp").process_group
    assert group_of(ParallelDims(tp=2), "edp").process_group is first
    assert group_of(ParallelDims(dp_replicate=2, tp=2), "dp_replicate").process_group is first
    # Of two neighbors, across, and of this rank.
    assert len(dist.distributed_c10d._world.pg_map) == before + 3
    assert ParallelDims(tp=2).process_group("pp").size() == 1


@pytest.mark.ranks(4)
def test_ranks_may_use_the_axes_in_different_orders() -> None:
    dims = ParallelDims(dp_replicate=2, ep=2)
    axes = ["dp_replicate", "ep", "edp"]
    for axis in axes if dist.get_rank() % 2 else reversed(axes):
        group_of(dims, axis)
    for axis in axes:
        total = torch.full((1,), float(dist.get_rank()))
        all_reduce(total, group_of(dims, axis)).wait()
        assert total.item() == sum(group_of(dims, axis).ranks)


@pytest.mark.ranks(4)
def test_a_description_of_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"is of 8 ranks, but torch\.distributed has 4"):
        group_of(ParallelDims(world_size=8), "fsdp")


@pytest.mark.ranks(4)
def test_meshes_of_torch_have_the_same_groups() -> None:
    dims = ParallelDims(dp_replicate=2, tp=2)
    mesh = dims.get_mesh(["dp_replicate", "fsdp", "tp"])
    assert mesh.mesh_dim_names == ("dp_replicate", "fsdp", "tp")
    assert mesh.mesh.tolist() == [[[0, 1]], [[2, 3]]]
    assert mesh["tp"].get_group() is dims.process_group("tp")
    assert mesh["fsdp"].get_group().size() == 1
    assert mesh["dp_replicate", "fsdp"].shape == (2, 1)
    assert dims.get_mesh("loss").get_local_rank() == dist.get_rank() // 2
    assert dims.get_mesh("tp") == dims.get_mesh(["tp"])
    with pytest.raises(ValueError, match=r"got tp, fsdp\. The order is dp_shard, cp, tp"):
        dims.get_mesh(["tp", "fsdp"])
    assert (dims.get_optional_mesh("cp"), dims.get_optional_mesh("tp")) == (None, dims.get_mesh("tp"))
    assert dims.world_mesh.mesh_dim_names == ("dp_replicate", "tp")
    assert group_of(dims.world_mesh["tp"]) == group_of(dims, "tp")
    assert ParallelDims(tp=4).world_mesh.mesh_dim_names == ("tp",)
