"""group.py: one answer to who I compute with, whatever the caller has in hand."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scale_core.comm.group import Group, group_of
from scale_core.comm.group_state import group_state
from scale_core.testing import run_ranks


class StandIn:
    def __init__(self, size: int) -> None:
        self._size = size

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size


def describe(group: Group) -> tuple[int, int, str, tuple[int, ...]]:
    return group.rank, group.size, group.backend, group.ranks


@pytest.mark.ranks(2)
def test_groups_of_the_same_ranks_count_optimizer_steps_together() -> None:
    both, again, one = (group_of(dist.new_group(ranks)) for ranks in ([0, 1], [0, 1], None))
    seen_before = dist.new_group([0, 1])
    assert group_state(seen_before).optimizer_steps is not both.state.optimizer_steps
    assert group_of(seen_before).state.optimizer_steps is both.state.optimizer_steps
    assert both.state is not again.state and both.state is group_of(both.process_group).state
    assert both.state.optimizer_steps is again.state.optimizer_steps is one.state.optimizer_steps


def test_without_torch_distributed_the_world_is_one() -> None:
    group = group_of()
    assert describe(group) == (0, 1, "none", (0,))
    assert group.process_group is None
    assert str(group) == "rank 0 of 1 (none)"


def test_an_object_that_knows_its_size_stands_for_a_world_of_one() -> None:
    assert group_of(StandIn(1)) == Group()


def test_an_object_that_claims_more_ranks_than_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got StandIn with 2 ranks.*new_group"):
        group_of(StandIn(2))


@pytest.mark.parametrize("what", [3, "gloo", torch.ones(2)])
def test_what_is_no_group_is_refused_by_its_type(what: object) -> None:
    with pytest.raises(TypeError, match=f"got {type(what).__name__}"):
        group_of(what)  # type: ignore[arg-type]


@pytest.mark.ranks(4)
def test_groups_meshes_and_subgroups_tell_rank_size_and_members() -> None:
    me = dist.get_rank()
    assert describe(group_of()) == describe(group_of(dist.group.WORLD)) == (me, 4, "gloo", (0, 1, 2, 3))
    group = group_of()
    assert group_of(group) is group

    backwards = dist.new_group([3, 1])
    if me in (1, 3):
        assert describe(group_of(backwards)) == ((1, 3).index(me), 2, "gloo", (1, 3))
    else:
        with pytest.raises(ValueError, match="not a member"):
            group_of(backwards)

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    assert group_of(mesh["outer"]).ranks == ((0, 2), (1, 3))[me % 2]
    assert group_of(mesh["inner"]).ranks == ((0, 1), (2, 3))[me // 2]
    with pytest.raises(
        ValueError, match=r"2 dimensions \('outer', 'inner'\): pass one of them, such as mesh\['outer'\]"
    ):
        group_of(mesh)
    with pytest.raises(ValueError, match=r"got 2 dimensions"):
        group_of(init_device_mesh("cpu", (2, 2)))

    alone = [dist.new_group([rank]) for rank in range(4)][me]
    assert describe(group_of(alone)) == (0, 1, "gloo", (me,))


@pytest.mark.ranks(1)
def test_a_backend_named_per_device_is_told_by_its_transport() -> None:
    assert group_of(dist.new_group(backend="cpu:gloo")).backend == "gloo"


@pytest.mark.ranks(1, backend=None)
def test_without_a_backend_a_group_has_the_one_of_its_device() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # torch calls its backend "undefined"
    assert group_of().backend == group_of(dist.new_group()).backend == ("nccl" if torch.cuda.is_available() else "gloo")


def found_again() -> tuple[bytes, bytes]:
    whole, me = group_of(), dist.get_rank()
    part = group_of(dist.new_group([me], use_local_synchronization=True))
    assert copy.deepcopy(whole) is whole
    for group in (whole, part, Group()):
        again = pickle.loads(pickle.dumps(group))
        assert (again.rank, again.size, again.ranks) == (group.rank, group.size, group.ranks)
    assert pickle.loads(pickle.dumps(whole)).process_group is dist.group.WORLD
    return pickle.dumps(whole), pickle.dumps(part)


def test_a_pickled_group_is_found_again_in_the_process() -> None:
    written = run_ranks(found_again, 2)
    for whole, part in written:
        assert pickle.loads(part) == Group()
        with pytest.raises(ValueError, match=r"over ranks \[0, 1\], but torch.distributed is not initialized"):
            pickle.loads(whole)
    assert run_ranks(read_of_another_rank, 2, [whole for whole, _ in written]) == [0, 1]


def read_of_another_rank(written: list[bytes]) -> int:
    me = dist.get_rank()
    with pytest.raises(
        ValueError, match=f"the shard of rank {1 - me} of 2, and this is rank {me}: save one file per rank"
    ):
        pickle.loads(written[1 - me])
    rank: int = pickle.loads(written[me]).rank
    return rank
