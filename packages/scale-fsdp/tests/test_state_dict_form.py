"""A state dict goes to the ranks and the device that were asked for, and holds one unit at a time on the way there."""

import pytest
import torch
import torch.distributed as dist
from fsdp_parity import sharded
from test_fsdp_state_dict import Model
from torch import nn

from scale_check.exact import assert_equal
from scale_check.simulate import simulate
from scale_fsdp import FullyShardedDataParallel, full_optim_state_dict, full_state_dict, fully_shard


@pytest.mark.ranks(3)
def test_a_state_dict_goes_where_it_was_asked_to_be():
    """In a world of three, whose ranks 1 and 2 share the model."""

    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    plain, first = Model(0), dist.get_rank() == 1
    form = {"state_dict_on_rank_0_only": True, "state_dict_device": "meta"}
    for kwargs in ({}, {"flatten_parameters": True}):
        model = sharded(plain, ["body.0", "embed"], group, **kwargs)
        model = FullyShardedDataParallel(model, group, **kwargs, **form)
        state = model.state_dict()
        assert list(state) == (list(plain.state_dict()) if first else [])
        assert all(tensor.is_meta for tensor in state.values()), "on another device"
        # A unit inside has its own form, and the call's comes before that of the module.
        assert_equal(model.body, plain.body)
        whole = full_state_dict(model, rank_0_only=True, device="cpu")
        assert first or not whole, f"{list(whole)} on the second rank"
        assert_equal(whole, plain if first else {})
        assert_equal(full_state_dict(model), plain)
        parent = nn.ModuleDict({"model": model, "other": nn.Linear(2, 2)})
        expected = [f"model.{name}" for name in plain.state_dict()] if first else []
        around = list(parent.state_dict())
        assert around == [*expected, "other.weight", "other.bias"], f"in a plain parent: {around}"
        assert list(full_state_dict(parent, rank_0_only=True)) == (around if first else [])
        filled = {"before": torch.zeros(1)}
        model.state_dict(destination=filled, prefix="a.")
        assert list(filled) == ["before", *(f"a.{name}" for name in state)], f"a given destination: {list(filled)}"


def test_a_wrong_form_of_the_state_is_refused_at_sharding():
    with pytest.raises(TypeError, match="state_dict_on_rank_0_only: expected True or False, got 'yes'"):
        FullyShardedDataParallel(nn.Linear(2, 2), state_dict_on_rank_0_only="yes")
    with pytest.raises(RuntimeError, match="nowhere"):
        FullyShardedDataParallel(nn.Linear(2, 2), state_dict_device="nowhere")


SIZE, LAYERS, WORLD = 64, 5, 4
BYTES = SIZE * SIZE * 4


def layers_on_the_stand_in() -> nn.Module:
    """A unit for each layer, and a larger one around them."""
    with torch.device("sim"):
        model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)))
        model.register_parameter("own", nn.Parameter(torch.ones(2 * SIZE, SIZE)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


@pytest.mark.simulation
@pytest.mark.parametrize("rank", [0, 1])
def test_one_unit_at_a_time_is_full_and_rank_0_keeps_copies(rank):
    with simulate(rank, WORLD, device="sim") as simulation:
        model = layers_on_the_stand_in()
        shards = (LAYERS + 2) * BYTES // WORLD
        simulation.restart()
        assert simulation.current_bytes == shards
        state = full_state_dict(model, rank_0_only=True, device="cpu")
        assert len(state) == (LAYERS + 1 if rank == 0 else 0)
        assert simulation.peak_bytes == shards + 2 * BYTES  # the largest unit
        assert simulation.current_bytes == shards
        assert simulation.on("cpu").peak_bytes == (0 if rank else (LAYERS + 2) * BYTES)


@pytest.mark.simulation
@pytest.mark.parametrize("rank", [0, 1])
def test_one_kind_of_state_of_one_unit_is_whole_at_a_time(rank):
    with simulate(rank, WORLD, device="sim") as simulation:
        model = layers_on_the_stand_in()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for param in model.parameters():
            optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)
        shards = 2 * (LAYERS + 2) * BYTES // WORLD
        simulation.restart()
        assert simulation.current_bytes == shards
        state = full_optim_state_dict(model, optimizer)
        assert (state is None) == (rank == 1)
        unit, sent = (0 if rank else 2 * BYTES), 2 * BYTES // WORLD  # Only the recipient has the unit.
        assert simulation.peak_bytes == shards + unit + sent
        assert simulation.current_bytes == shards
        assert simulation.on("cpu").peak_bytes == (0 if rank else (LAYERS + 2) * BYTES)
