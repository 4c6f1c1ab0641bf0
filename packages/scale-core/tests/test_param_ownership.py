"""Each tensor that an optimizer steps on tells which parameters, or which of their elements, stand in it."""

import pytest
import torch
from sharded_by_hand import Model, cut
from torch import nn

from scale_core.comm.group import Group
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.layout import FlatLayout
from scale_core.optim.traits import is_per_param_number
from scale_core.shard import Axis, Placement, Shard, full_numel, on_local_tensors
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.state.param_ownership import (
    flat_buffer_of,
    named_param_slices,
    num_parameters,
    param_slices,
    register_flat_param,
)

WORLD = 3


class Flat(nn.Module):
    """What a unit shows with flat parameters: one, which holds the parameters of a plain model."""

    def __init__(self, plain: nn.Module, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        named = dict(plain.named_parameters())
        layout = FlatLayout.plan(list(named), [tuple(param.shape) for param in named.values()], size, "element")
        self.buffer = FlatBuffer(list(named), list(named.values()), layout, Group(rank, size), flatten=True)
        for index, param in enumerate(named.values()):
            self.buffer.load(index, param)
        self.flat_param_0 = self.buffer.sharded_params[0]
        register_flat_param(self.buffer)


@on_local_tensors
def test_a_whole_parameter_holds_itself() -> None:
    model = nn.Linear(3, 2)
    holding = named_param_slices(model)["weight"]
    assert (holding.shape, holding.start, holding.stop, holding.is_shard) == ((2, 3), 0, 6, False)
    assert holding.view(model.weight).is_set_to(model.weight)


@on_local_tensors
def test_a_shard_holds_its_range() -> None:
    plain = dict(Model().named_parameters())
    for rank in range(WORLD):
        for name, holding in named_param_slices(cut(Model(), rank, WORLD)).items():
            whole = plain[name].reshape(-1)
            assert holding.shape == tuple(plain[name].shape)
            assert torch.equal(holding.view(holding.owner), whole[holding.start : holding.stop])


@on_local_tensors
def test_a_flat_parameter_holds_many_under_their_own_names() -> None:
    plain = dict(Model().named_parameters())
    for rank in range(WORLD):
        model = Flat(Model(), rank, WORLD)
        holdings = named_param_slices(model)
        assert list(holdings) == list(plain)
        for name, holding in holdings.items():
            part = holding.view(model.flat_param_0)
            assert torch.equal(part.reshape(-1), plain[name].reshape(-1)[holding.start : holding.stop])
            assert part.shape == holding.local_shape
            state = torch.zeros_like(model.flat_param_0)
            holding.view(state).fill_(1)
            assert int(state.sum()) == holding.stop - holding.start


@on_local_tensors
def test_later_names_of_what_a_flat_parameter_holds_count() -> None:
    model = Flat(nn.Linear(3, 2))
    model.buffer.rename(["a.weight", "a.bias"])
    assert list(named_param_slices(model)) == ["a.weight", "a.bias"]
    assert flat_buffer_of(model.flat_param_0) is model.buffer
    assert flat_buffer_of(nn.Parameter(torch.ones(1))) is None


@on_local_tensors
def test_summands_and_names_that_stand_twice_are_errors() -> None:
    model = nn.Linear(2, 2, bias=False)
    set_shard(model.weight, Shard("weight", (2, 2), 0, 4, (Axis(Group(), Placement.PARTIAL),)))
    with pytest.raises(ValueError, match="weight is a partial sum on each rank"):
        list(param_slices(model.weight, "weight"))
    twice = nn.ModuleList([Flat(nn.Linear(2, 2)), Flat(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match=r"two parameters are named weight: the second is listed as 1.flat_param_0"):
        named_param_slices(twice)


@pytest.mark.parametrize(
    ("key", "shape", "param_shape", "expected"),
    [
        ("step", (), (), True),
        ("exp_avg", (), (), False),
        ("exp_avg", (), (3,), True),
        ("step", (3,), (3,), False),
    ],
)
@on_local_tensors
def test_of_a_scalar_the_name_tells_a_count_from_a_state(
    key: str, shape: tuple[int, ...], param_shape: tuple[int, ...], expected: bool
) -> None:
    assert is_per_param_number(key, shape, param_shape) is expected


@pytest.mark.parametrize("rank", range(WORLD))
@on_local_tensors
def test_full_parameters_are_counted_whatever_a_rank_holds(rank: int) -> None:
    whole = sum(param.numel() for param in Model().parameters())
    for model in (Model(), cut(Model(), rank, WORLD), Flat(Model(), rank, WORLD)):
        assert num_parameters(model) == whole
    model = cut(Model(), rank, WORLD)
    assert sum(map(full_numel, model.parameters())) == whole
    first = next(model.parameters()).requires_grad_(False)
    trained = sum(param.numel() for param in Model().parameters() if param.requires_grad)
    assert num_parameters(model, only_trainable=True) == trained - full_numel(first)
