"""Writes to the tensors of a state dict reach the shards, as those to a plain module's reach its parameters."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_parity import sharded
from test_fsdp_state_dict import TOKENS, WAYS, Model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scale_check.exact import assert_equal
from scale_fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, full_state_dict, fully_shard


def average_by_operators(average: nn.Module, model: nn.Module) -> None:
    new = model.state_dict()
    for name, value in average.state_dict().items():
        if value.dtype.is_floating_point:
            value *= 0.5
            value += 0.5 * new[name].detach()


def average_by_copies(average: nn.Module, model: nn.Module) -> None:
    for value, new in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        value.copy_(0.5 * value + 0.5 * new if value.is_floating_point() else new)


def average_by_lists(average: nn.Module, model: nn.Module) -> None:
    values, new = average.state_dict(), model.state_dict()
    names = [name for name, value in values.items() if value.is_floating_point()]
    names.remove("head.weight")  # It is "embed.weight".
    torch._foreach_lerp_([values[name] for name in names], [new[name] for name in names], 0.5)


def load_what_fits(average: nn.Module, model: nn.Module) -> None:
    values = average.state_dict()
    for name, value in model.state_dict().items():
        if not name.startswith("body.2"):
            values[name].copy_(value)
    average.load_state_dict(values)


def prune_rows(average: nn.Module, model: nn.Module) -> None:
    values = average.state_dict()
    values["body.0.weight"][2:4] = 0
    values["embed.weight"].data.view(-1)[3] += 1
    values["head.weight"].mul_(2)
    values["body.1.running_mean"].add_(1)
    average.body.state_dict()["2.bias"].fill_(3)


CHANGES = [average_by_operators, average_by_copies, average_by_lists, load_what_fits, prune_rows]
OPTIONS = [{}, {"flatten_parameters": True}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}]


@pytest.mark.ranks(1, 2, 3, in_turn=True)
@torch.no_grad()
def test_averages_and_partial_loads_are_those_of_plain_pytorch():
    world = dist.get_world_size()
    for number, (way, options, change) in enumerate(itertools.product(WAYS, OPTIONS, CHANGES)):
        if world == 1 or number % 2 == world % 2:
            plain, average = Model(1), sharded(Model(1), WAYS[way], **options)
            change(plain, Model(2))
            change(average, sharded(Model(2), WAYS[way], **options))
            assert_equal(average, plain, f"{change.__name__}, {way}, {options}")


@pytest.mark.ranks(4, in_turn=True)
def test_converted_and_twice_divided_parameters_are_written_to():
    """Copies on a device that was asked for, buffers that the policy has cast, and layers of another axis."""
    plain = Model(1).double()
    options = {"state_dict_device": "cpu", "buffer_dtype": torch.float32}
    model = FullyShardedDataParallel(copy.deepcopy(plain), **options)
    with torch.no_grad():
        for changed in (plain, model):
            for value in changed.state_dict().values():
                value.mul_(2)
    assert_equal(model, plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)).double()
    divided = parallelize_module(copy.deepcopy(layers), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    divided = fully_shard(divided, mesh=mesh["dp"])
    with torch.no_grad():
        for changed in (layers, divided):
            for value in changed.state_dict().values():
                value[1:].mul_(2)
    assert_equal(divided, layers)


def refused(text: str) -> Any:
    return pytest.raises(RuntimeError, match=re.escape(text))


@pytest.mark.ranks(2, in_turn=True)
def test_old_values_are_neither_used_nor_written_back():
    """The forward after a write computes with what was written, and what can't be written raises."""
    plain = Model(1).eval()
    model = fully_shard(copy.deepcopy(plain), reshard_after_forward=False).eval()
    model(TOKENS)
    with torch.no_grad():
        for changed in (plain, model):
            changed.state_dict()["body.0.weight"].mul_(2)
    assert torch.equal(model(TOKENS), plain(TOKENS))
    model.reshard()
    optimizer, state = torch.optim.SGD(model.parameters(), lr=1.0, fused=True), model.state_dict()
    model(TOKENS).sum().backward()
    with refused("the parameters of the root unit are in use"):
        model.unshard()
        state["body.0.weight"].zero_()
    model.reshard()
    optimizer.step()
    with refused("of a state dict was written to, but the model has other values now"):
        for values in state.values():  # Which of them this rank has elements of depends on the layout.
            values.zero_()
    state = model.state_dict()
    model.double()
    with refused("other values now"):
        state["embed.weight"].zero_()


@pytest.mark.ranks(2, in_turn=True)
def test_inside_summon_the_state_is_that_of_the_parameters():
    for options in OPTIONS:
        plain, model = Model(1), sharded(Model(1), WAYS["units"], **options)
        with torch.no_grad(), model.summon_full_params():
            for changed in (plain, model):
                changed.embed.weight.mul_(2)
                state = changed.state_dict()
                state["embed.weight"].add_(1)
                state["body.0.bias"][0] = 5
                changed.body.state_dict()["2.weight"].zero_()
            assert_equal(model, plain)
            copies = full_state_dict(model)
            copies["embed.weight"].zero_()
        assert_equal(model, plain)
        with refused("summon_full_params() is over"):
            state["body.2.weight"].zero_()
        with torch.no_grad(), model.summon_full_params(volatile=True):
            model.state_dict()["embed.weight"].zero_()
        assert_equal(model, plain)


@pytest.mark.ranks(2, in_turn=True)
def test_copies_do_not_write_to_the_model():
    """What is asked for as a copy does not write, and a copy on one rank alone can't."""
    plain, model = Model(1), sharded(Model(1), WAYS["units"])
    for state in (full_state_dict(model), get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))):
        assert {type(value) for value in state.values()} == {Tensor}
        for name in ("embed.weight", "body.0.bias"):
            state[name].zero_()
    full_state_dict(model)["scale"].zero_()
    assert_equal(model, plain)
    model = FullyShardedDataParallel(Model(1), state_dict_on_rank_0_only=True)
    state = model.state_dict()
    if dist.get_rank() == 0:
        with refused("only rank 0 has this state dict"):
            state["embed.weight"].zero_()
    assert_equal(copy.deepcopy(model), plain if dist.get_rank() == 0 else {})


@pytest.mark.ranks(2, in_turn=True)
def test_a_checkpoint_of_torch_loads_into_the_state_in_place(tmp_path: Path):
    """`torch.distributed.checkpoint` writes to the tensors that it is given."""
    folder = str(tmp_path)
    dcp.save({"model": sharded(Model(2), WAYS["units"]).state_dict()}, checkpoint_id=folder)
    model = sharded(Model(1), WAYS["units"])
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    assert_equal(model, Model(2))


@pytest.mark.ranks(2, in_turn=True)
def test_files_and_copies_of_a_state_are_plain(tmp_path: Path) -> None:
    plain, model = Model(1), sharded(Model(1), WAYS["units"])
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(model.state_dict(), path)
    loaded = torch.load(path, weights_only=True)
    assert not [f"{name}: {type(value)}" for name, value in loaded.items() if type(value) is not Tensor]
    assert loaded["embed.weight"].data_ptr() == loaded["head.weight"].data_ptr(), "a tied parameter was saved twice"
    assert_equal(model, loaded)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    copied = copy.deepcopy(model.state_dict())
    for value in (*kept.values(), *copied.values()):
        value.zero_()
    assert_equal(model, plain)
