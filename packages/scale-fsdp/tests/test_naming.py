"""Every parameter of the plain model is found by its name there, however it was wrapped, flattened or tied."""

import pytest
import torch
from state_cases import WRAPPINGS, Awkward, Layout
from torch import nn

from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_fsdp import FullyShardedDataParallel, fully_shard
from scale_fsdp.runtime.unit import unit_of
from scale_fsdp.state_dict.naming import (
    all_names,
    locations_by_buffer,
    model_group,
    param_locations,
    plain_order,
    slices_in,
    tied_names,
)

LAYOUTS = [Layout(wrapping=wrapping, flatten=flatten) for wrapping in WRAPPINGS for flatten in (False, True)]

each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


@each_layout
def test_parameters_have_the_plain_names_in_the_plain_order(layout: Layout) -> None:
    plain = Awkward()
    model = layout.shard(Awkward())
    assert list(param_locations(model)) == [name for name, _ in plain.named_parameters()]
    assert list(all_names(model)) == [name for name, _ in plain.named_parameters(remove_duplicate=False)]
    assert tied_names(model) == {"head.weight": "embed.weight"}


@each_layout
def test_the_plain_order_is_that_of_the_plain_state_dict(layout: Layout) -> None:
    plain = Awkward().state_dict()
    order = plain_order(layout.shard(Awkward()), prefix="a.")
    assert sorted((f"a.{name}" for name in plain), key=order.__getitem__) == [f"a.{name}" for name in plain]


@each_layout
def test_a_place_knows_the_parameter_s_elements(layout: Layout) -> None:
    plain = Awkward()
    for name, place in param_locations(layout.shard(Awkward())).items():
        assert place.entry.shape == tuple(plain.get_parameter(name).shape)
        piece = place.buffer.pieces[place.index]
        assert torch.equal(
            piece, plain.get_parameter(name).reshape(-1)[place.span.start : place.span.stop].view_as(piece)
        )
        assert place.buffer in place.unit.buffers


@each_layout
def test_slices_come_in_the_order_of_the_optimizer(layout: Layout) -> None:
    plain = Awkward()
    model = layout.shard(Awkward())
    holdings = slices_in(model)
    assert list(map(id, holdings)) == list(map(id, model.parameters()))
    held = {holding.name: holding.view(owner) for owner, each in holdings.items() for holding in each}
    assert held.keys() == dict(plain.named_parameters()).keys()
    assert all(torch.equal(tensor, plain.get_parameter(name)) for name, tensor in held.items())
    assert all(holding.shares_owner == layout.flatten for each in holdings.values() for holding in each)


def test_names_are_those_of_the_state_dict_in_any_parent() -> None:
    parent = nn.ModuleDict({"model": FullyShardedDataParallel(nn.Linear(3, 2)), "other": nn.Linear(2, 2)})
    assert list(param_locations(parent)) == ["model.weight", "model.bias"]
    names = [holding.name for each in slices_in(parent).values() for holding in each]
    assert names == list(parent.state_dict())
    assert not [holding for each in slices_in(nn.Linear(2, 2)).values() for holding in each if holding.is_shard]


def test_a_module_in_two_places_has_two_names() -> None:
    shared = nn.Linear(2, 2, bias=False)
    plain = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    model = nn.Sequential(plain)
    fully_shard(model)
    assert list(all_names(model)) == ["0.a.weight", "0.b.0.weight"]
    assert tied_names(model) == {"0.b.0.weight": "0.a.weight"}
    assert torch.equal(model.state_dict()["0.b.0.weight"], shared.weight)


def test_each_buffer_comes_with_its_unit_and_the_numbers_in_it() -> None:
    model = Layout(wrapping="units").shard(Awkward())
    found = {unit.name: {each.name: each.index for each in its} for unit, _, its in locations_by_buffer(model) if its}
    assert found["embed"] == {"embed.weight": 0}
    assert found["body.0"] == {"body.0.weight": 0, "body.0.bias": 1}
    assert model_group(model).size == model_group(nn.Linear(1, 1)).size == 1


def test_summands_of_a_plain_parameter_have_no_holding() -> None:
    model = nn.ModuleList([fully_shard(nn.Linear(2, 2)), nn.Linear(2, 2, bias=False)])
    unit = unit_of(model[0])
    assert unit is not None
    set_shard(model[1].weight, Shard("weight", (2, 2), 0, 4, (Axis(unit.buffers[0].group, Placement.PARTIAL),)))
    with pytest.raises(ValueError, match="weight is a partial sum on each rank"):
        slices_in(model)
