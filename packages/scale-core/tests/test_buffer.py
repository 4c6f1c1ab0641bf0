"""buffer.py: one buffer, its gathers and releases, and the memory that each state takes."""

from __future__ import annotations

import copy
import pickle
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from flat_by_hand import SHAPES, average, backward, gathered, make, pieces_of, whole_params
from torch import Tensor, nn

from scale_core.comm.collectives import all_gather
from scale_core.comm.group import Group, group_of
from scale_core.comm.subgroups import subgroup_of
from scale_core.comm.work import CollectiveWork
from scale_core.flat.buffer import FlatBuffer, State
from scale_core.flat.config import DtypePolicy, ShardGroups
from scale_core.flat.layout import FlatLayout
from scale_core.flat.live_buffers import live_buffers
from scale_core.shard import Placement, on_local_tensors, shard_of


def state_of(buffer: FlatBuffer) -> State:
    return buffer.state


@pytest.mark.ranks(2, in_turn=True)
def test_a_kept_part_is_gathered_among_those_that_keep_it() -> None:
    """What some ranks keep of the full buffer they gather among themselves; without it all ranks give their shards."""
    group, params = group_of(), whole_params()
    gathers: list[str] = []
    few = subgroup_of(group, group.ranks)  # All of them, as a group of its own.
    layout = FlatLayout.plan(list(SHAPES), [tuple(param.shape) for param in params], group.size)
    buffer = FlatBuffer(list(SHAPES), params, layout, ShardGroups(group, part=few))

    def recorded(output: Tensor, shard: Tensor, ranks: Group, **kwargs: Any) -> CollectiveWork:
        gathers.append("part" if ranks is few else "all")
        return all_gather(output, shard, ranks, **kwargs)

    with mock.patch("scale_core.flat.buffer.all_gather", recorded):
        for keep_part in (True, False, False):
            for whole, param in zip(gathered(buffer), params, strict=True):
                assert torch.equal(whole, param)
            buffer.release(keep_part=keep_part)
    assert gathers == ["all", "part", "all"]


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@on_local_tensors
def test_a_gathered_buffer_holds_all_and_a_released_one_nothing(num_ranks: int) -> None:
    group, params = group_of(), whole_params()
    buffer = make(group, params=params)
    storage = buffer.full.untyped_storage()
    for _ in range(2):
        assert state_of(buffer) is State.SHARDED
        if group.size > 1:
            assert storage.nbytes() == 0
        for whole, param in zip(gathered(buffer), params, strict=True):
            assert torch.equal(whole, param) and whole.untyped_storage()._cdata == storage._cdata
        assert state_of(buffer) is State.GATHERED
        buffer.gather()  # Nothing to do.
        buffer.release()
    buffer.gather(tag=1 << 21)
    buffer.release()  # Also where it is still on its way.
    assert buffer.state is State.SHARDED
    for piece, expected in zip(buffer.sharded_params, pieces_of(buffer, params), strict=True):
        assert torch.equal(piece, expected)
    for whole, param in zip(buffer.gather_full_params(), params, strict=True):
        assert torch.equal(whole, param)


@pytest.mark.ranks(2, in_turn=True)
@on_local_tensors
def test_exposed_parameters_say_what_they_are_pieces_of() -> None:
    group = group_of()
    buffer = make(group)
    buffer.rename([f"block.{name}" for name in SHAPES], unit="block")
    for name, span, param in zip(SHAPES, buffer.spans, buffer.sharded_params, strict=True):
        shard = shard_of(param)
        assert shard is not None
        assert (shard.name, shard.unit, shard.shape) == (f"block.{name}", "block", SHAPES[name])
        assert (shard.start, shard.stop) == (span.start, span.stop) and param.numel() == span.numel
        assert [(axis.group, axis.placement) for axis in shard.axes] == [(group, Placement.SHARD)]
    flat = make(group, flatten=True)
    (param,) = flat.sharded_params
    shard = shard_of(param)
    assert shard is not None and shard.name == "flat_param"
    assert shard.shape == (flat.layout.full_numel,) and shard.stop - shard.start == param.numel()
    assert param.data_ptr() == flat.shard.data_ptr()


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_computing_dtype_is_that_of_the_full_buffer_only(num_ranks: int) -> None:
    group, params = group_of(), whole_params()
    buffer = make(group, DtypePolicy(compute=torch.bfloat16), params=params)
    for whole, param in zip(gathered(buffer), params, strict=True):
        assert whole.dtype == torch.bfloat16 and torch.equal(whole, param.bfloat16())
    buffer.release()
    assert buffer.full.untyped_storage().nbytes() == 0
    assert buffer.shard.dtype == torch.float32
    for whole, param in zip(buffer.gather_full_params(), params, strict=True):
        assert torch.equal(whole, param)


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize("num_ranks", [1, 3])
@on_local_tensors
def test_one_flat_parameter_can_stand_for_all(num_ranks: int) -> None:
    group = group_of()
    buffer = make(group, flatten=True)
    backward(buffer, [0, 2], group.rank)
    buffer.reduce()
    buffer.commit()
    (param,) = buffer.sharded_params
    assert param.grad is not None and param.grad.shape == param.shape == (buffer.layout.shard_numel,)
    torch.optim.SGD([param], lr=1.0).step()
    for index, (whole, before) in enumerate(zip(gathered(buffer), whole_params(), strict=True)):
        step = average(group.size, index, before.shape) if index in (0, 2) else 0
        assert torch.equal(whole, before.detach() - step)
    buffer.release()


@pytest.mark.ranks(2, in_turn=True)
def test_a_write_to_a_shard_makes_the_gathered_buffer_stale() -> None:
    """Whatever writes to a shard while its full buffer is gathered is noticed."""
    group, unnoticed = group_of(), []
    optimizers: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "SGD": lambda params: torch.optim.SGD(params, lr=1.0),
        "Adam": lambda params: torch.optim.Adam(params),
        "foreach": lambda params: torch.optim.Adam(params, foreach=True),
        "fused": lambda params: torch.optim.Adam(params, fused=True),
    }
    for flatten in (False, True):
        for name, build in optimizers.items():
            buffer = make(group, flatten=flatten)
            optimizer = build(buffer.sharded_params)
            backward(buffer, [0, 1, 2, 3, 4], group.rank)
            buffer.reduce()
            buffer.commit()
            gathered(buffer)
            assert not buffer.is_stale()
            optimizer.step()
            if not buffer.is_stale():
                unnoticed.append(f"{name} flatten={flatten}")
            buffer.release()
            assert not buffer.is_stale()
    buffer = make(group)
    gathered(buffer)
    buffer.load(4, torch.zeros(7))
    if not buffer.is_stale():
        unnoticed.append("load")
    buffer.release()
    assert unnoticed == []


@pytest.mark.ranks("num_ranks", in_turn=True)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@on_local_tensors
def test_after_a_discard_everything_works_again(num_ranks: int) -> None:
    """After an error that all ranks have, the buffer is as before it and the group still works.

    Gradients that waited stay, and those of the pass that failed go.
    """
    group, params = group_of(), whole_params()
    buffer = make(group, params=params)
    backward(buffer, [0], group.rank)
    buffer.commit()
    backward(buffer, [0, 1], group.rank)
    buffer.gather(tag=1 << 21)
    buffer.discard()
    assert buffer.state is State.SHARDED and buffer.has_gradient and buffer.gradient.has_grad() == [0]
    buffer.gradient.drop()
    assert not buffer.has_gradient
    if group.size > 1:
        assert buffer.full.untyped_storage().nbytes() == 0
    for whole, param in zip(gathered(buffer), params, strict=True):
        assert torch.equal(whole, param)
    (buffer.unsharded_params[1] * 2).sum().backward()
    buffer.gradient.accumulate(1)
    buffer.reduce(tag=1 << 22)
    buffer.discard()
    assert buffer.sharded_params[1].grad is None
    backward(buffer, [0, 1, 2, 3, 4], group.rank)
    buffer.reduce(tag=1 << 22)
    buffer.commit()
    wholes = [average(group.size, i, shape) for i, shape in enumerate(SHAPES.values())]
    for param, expected in zip(buffer.sharded_params, pieces_of(buffer, wholes), strict=True):
        assert param.grad is not None and torch.equal(param.grad, expected)
    dist.barrier()


@pytest.mark.ranks(2, in_turn=True)
def test_frozen_parameters_among_trained_ones_get_no_gradient() -> None:
    group, params = group_of(), whole_params()
    params[1].requires_grad_(False)
    buffer = make(group, params=params)
    assert [whole.requires_grad for whole in buffer.unsharded_params] == [True, False, True, True, True]
    backward(buffer, [0, 2, 3, 4], group.rank)
    assert buffer.gradient.missing() == []
    buffer.reduce()
    buffer.commit()
    assert buffer.sharded_params[1].grad is None and buffer.sharded_params[0].grad is not None
    buffer.sharded_params[1].requires_grad_(True)
    buffer.follow_trainable()
    assert buffer.unsharded_params[1].requires_grad and buffer.trains


@pytest.mark.ranks(3, in_turn=True)
def test_fewer_elements_than_ranks_and_none_at_all() -> None:
    """More ranks than elements, and nothing at all."""
    group = group_of()
    for params in ([nn.Parameter(torch.tensor(3.0))], [nn.Parameter(torch.empty(0, 4))]):
        buffer = make(group, params=params)
        assert torch.equal(gathered(buffer)[0], params[0].detach())
        (buffer.unsharded_params[0] * 2).sum().backward()
        buffer.gradient.accumulate(0)
        buffer.reduce()
        buffer.commit()
        grad = buffer.sharded_params[0].grad
        assert grad is not None and grad.shape == buffer.sharded_params[0].shape
        buffer.release()


def test_a_world_of_one_computes_with_the_shard_itself() -> None:
    buffer = make(Group())
    assert buffer.is_aliased and buffer.unsharded_params[0].data_ptr() == buffer.sharded_params[0].data_ptr()


def test_a_write_to_a_gathered_parameter_is_seen() -> None:
    aliased, buffer = make(Group()), make(Group(), DtypePolicy(compute=torch.float64))
    for each in (aliased, buffer):
        for _ in range(2):
            gathered(each)
            assert not each.is_overwritten
            each.release()
        gathered(each)
        with torch.no_grad():
            each.unsharded_params[1].detach().mul_(2)
    assert buffer.is_overwritten and not aliased.is_overwritten  # There it is the shard itself.
    buffer.release()
    gathered(buffer)
    assert not buffer.is_overwritten


def test_every_flat_tensor_that_lives_is_listed() -> None:
    buffer = make(Group(), DtypePolicy(compute=torch.bfloat16))

    def kinds() -> list[str]:
        mine = buffer.shard, buffer.full, buffer.gradient.flat  # Other tests may have left some of theirs.
        return sorted(kind for kind, tensor in live_buffers() if any(tensor is one for one in mine))

    assert kinds() == ["shard"]
    gathered(buffer)
    assert kinds() == ["gathered", "shard"]
    buffer.unsharded_params[0].sum().backward()
    buffer.gradient.accumulate(0)
    assert kinds() == ["gathered", "gradient", "shard"]


def test_noncontiguous_parameters_are_taken_in_row_major_order() -> None:
    param = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    buffer = make(Group(), params=[param])
    assert torch.equal(gathered(buffer)[0], param.detach())


@pytest.mark.ranks(2, in_turn=True)
@on_local_tensors
def test_a_buffer_moves_into_another_shard_with_its_parameters() -> None:
    group = group_of()
    for flatten in (False, True):
        params = whole_params()
        buffer = make(group, params=params, flatten=flatten)
        buffer.sharded_params[0].requires_grad_(False)
        gathered(buffer)
        kept, version = list(buffer.sharded_params), buffer.version
        buffer.set_storage(buffer.shard.to(torch.float64))
        assert state_of(buffer) is State.SHARDED
        assert buffer.version > version
        assert all(now is then for now, then in zip(buffer.sharded_params, kept, strict=True))
        assert not buffer.sharded_params[0].requires_grad
        assert buffer.dtype == buffer.compute_dtype == buffer.sharded_params[0].dtype == torch.float64
        assert all(torch.equal(a, b.double()) for a, b in zip(gathered(buffer), params, strict=True))
        with torch.no_grad():
            buffer.sharded_params[-1].add_(1.0)  # It has a version counter of its own now.
        assert buffer.is_stale()
        shard = shard_of(buffer.sharded_params[0])
        assert shard is not None
        layout = FlatLayout.plan(list(SHAPES), list(SHAPES.values()), 1)
        buffer.set_storage(torch.ones(layout.shard_numel), layout=layout, groups=ShardGroups(Group()))
        assert buffer.is_aliased
        assert [tuple(w.shape) for w in gathered(buffer)] == list(SHAPES.values())
        assert shard_of(buffer.sharded_params[0]) != shard


def test_a_buffer_on_meta_has_shapes_and_gets_values_by_moving() -> None:
    params = [nn.Parameter(param.detach().to("meta")) for param in whole_params()]
    buffer = make(Group(), params=params)
    assert buffer.is_meta
    assert all(whole.is_meta for whole in buffer.gather_full_params())
    before = list(buffer.sharded_params)
    buffer.set_storage(torch.zeros(buffer.layout.shard_numel))
    assert not buffer.is_meta
    assert not any(now is then for now, then in zip(buffer.sharded_params, before, strict=True))  # torch can't do that.
    for index, param in enumerate(whole_params()):
        buffer.load(index, param)
    assert all(torch.equal(a, b) for a, b in zip(gathered(buffer), whole_params(), strict=True))


@pytest.mark.ranks(2, in_turn=True)
@on_local_tensors
def test_a_copy_of_a_buffer_holds_the_same_and_shares_nothing() -> None:
    for flatten in (False, True):
        params = whole_params()
        buffer = make(group_of(), DtypePolicy(compute=torch.bfloat16), params=params, flatten=flatten)
        gathered(buffer)
        for other in (copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))):
            assert state_of(other) is State.SHARDED
            assert [shard_of(param) for param in other.sharded_params] == [
                shard_of(param) for param in buffer.sharded_params
            ]
            assert all(param.untyped_storage() is other.shard.untyped_storage() for param in other.sharded_params)
            with torch.no_grad():
                other.sharded_params[0].zero_()
            wholes = gathered(buffer)
            assert all(torch.equal(a, b.bfloat16()) for a, b in zip(wholes, params, strict=True))
            assert not torch.equal(gathered(other)[0], wholes[0])


@pytest.mark.ranks(2, in_turn=True)
def test_a_copied_shard_may_be_written_to_while_it_is_gathered() -> None:
    """Rank 0 writes to its shard before rank 1 begins."""
    group = group_of()
    layout = FlatLayout.plan(["weight"], [(2,)], group.size)
    buffer = FlatBuffer(["weight"], [torch.tensor([1.5, 1.5])], layout, group)
    if group.rank == 1:
        time.sleep(0.5)
    buffer.gather(tag=1 << 21, copies_shard=True)
    buffer.sharded_params[0].data.mul_(0.5)
    buffer.wait_gathered(30.0)
    assert buffer.full.tolist() == [1.5, 1.5]
