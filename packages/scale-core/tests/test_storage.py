"""storage.py: what each rank keeps adds up to the parameters, and says what it is a piece of."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from scale_core.comm.group import Group
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.layout import FlatLayout
from scale_core.shard import Placement, shard_of

pytestmark = pytest.mark.local_tensors

NAMES = ["weight", "bias", "scale"]
WHOLES = [torch.arange(21.0).view(7, 3), torch.arange(100.0, 105.0), torch.tensor(7.0)]


def shard_on(rank: int, size: int, flatten: bool = False, trainable: Sequence[bool] = (True, True, True)) -> FlatBuffer:
    """What one rank keeps of the parameters above; the others need not exist for that."""
    group = Group(rank=rank, size=size, backend="fake", ranks=tuple(range(size)))
    layout = FlatLayout.plan(NAMES, [tuple(whole.shape) for whole in WHOLES], size, "auto")
    params = [nn.Parameter(whole, wanted) for whole, wanted in zip(WHOLES, trainable, strict=True)]
    shard = FlatBuffer(NAMES, params, layout, group, flatten=flatten)
    shard.rename([f"layer.{name}" for name in NAMES], "layer", "layer.flat_param_0")
    return shard


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_pieces_of_all_ranks_are_the_parameters(size: int) -> None:
    shards = [shard_on(rank, size) for rank in range(size)]
    for index, whole in enumerate(WHOLES):
        pieces = [shard.pieces[index].reshape(-1) for shard in shards]
        assert torch.equal(torch.cat(pieces), whole.reshape(-1))


def test_each_piece_says_what_it_is_a_piece_of() -> None:
    for rank in range(2):
        shard = shard_on(rank, 2)
        for index, whole in enumerate(WHOLES):
            told = shard_of(shard.sharded_params[index])
            assert told is not None and told.name == f"layer.{NAMES[index]}" and told.unit == "layer"
            assert told.shape == tuple(whole.shape) and [axis.placement for axis in told.axes] == [Placement.SHARD]
            part = whole.reshape(-1)[told.start : told.stop]
            assert torch.equal(shard.sharded_params[index].reshape(-1), part)


def test_a_flattened_optimizer_sees_one_parameter() -> None:
    shard = shard_on(1, 2, flatten=True, trainable=(False, True, False))
    (param,) = shard.sharded_params
    assert param.requires_grad and shard.trains and param.numel() == shard.layout.shard_numel
    assert all(shard.sharded_param(index) is param for index in range(3))
    told = shard_of(param)
    assert told is not None and (told.name, told.start) == ("layer.flat_param_0", shard.layout.shard_numel)
    assert not shard_on(0, 2, trainable=(False, False, False)).trains


def test_a_write_to_any_piece_counts_as_one_to_the_shard() -> None:
    for rank in range(5):
        shard = shard_on(rank, 5)
        for param in shard.sharded_params:
            before = shard.version
            with torch.no_grad():
                param.mul_(2)
            assert shard.version > before


def test_existing_parameters_stay_the_same_objects() -> None:
    shard = shard_on(0, 2)
    before = list(shard.sharded_params)
    before[0].grad = torch.ones_like(before[0])
    shard._set_shard(shard.shard.double())
    shard._rebind_params(before)
    assert [id(param) for param in shard.sharded_params] == [id(param) for param in before]
    assert before[0].grad is None and before[0].dtype is torch.float64
    assert before[0].data_ptr() == shard.pieces[0].data_ptr()


def test_a_whole_without_values_changes_nothing() -> None:
    shard = shard_on(0, 1)
    shard.load(0, nn.Parameter(torch.empty(7, 3, device="meta")))
    assert torch.equal(shard.pieces[0], WHOLES[0]) and not shard.is_meta


def test_pieces_carry_the_attributes_of_the_parameters() -> None:
    params = [nn.Parameter(whole) for whole in WHOLES]
    params[1]._no_weight_decay = True  # type: ignore[attr-defined]
    shard = shard_on(0, 2)
    assert [vars(param) for param in shard._make_sharded_params(params)] == [{}, {"_no_weight_decay": True}, {}]
    flat = shard_on(0, 2, flatten=True)
    assert [vars(param) for param in flat._make_sharded_params(params)] == [{}]
