"""Writes to the tensors of a state dict reach the shards, as those to a plain module's reach its parameters."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsdp_beside import sharded
from fsdp_cases import differing_weights
from test_fsdp_state_dict import TOKENS, WAYS, Model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from scale_core.testing import run_ranks
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


@torch.no_grad()
def changed_as_plain() -> list[str]:
    wrong = []
    for way, units in WAYS.items():
        for options in OPTIONS:
            for change in CHANGES:
                plain, average = Model(1), sharded(Model(1), units, **options)
                change(plain, Model(2))
                change(average, sharded(Model(2), units, **options))
                wrong += [f"{change.__name__}, {way}, {options}: {line}" for line in differing_weights(average, plain)]
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_averages_and_partial_loads_are_those_of_plain_pytorch(world):
    assert not any(run_ranks(changed_as_plain, world))


def other_forms() -> list[str]:
    """Copies on a device that was asked for, buffers that the policy has cast, and layers of another axis."""
    plain, wrong = Model(1).double(), []
    options = {"state_dict_device": "cpu", "buffer_dtype": torch.float32}
    model = FullyShardedDataParallel(copy.deepcopy(plain), **options)
    with torch.no_grad():
        for changed in (plain, model):
            for value in changed.state_dict().values():
                value.mul_(2)
    wrong += differing_weights(model, plain)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5)).double()
    divided = parallelize_module(copy.deepcopy(layers), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    divided = fully_shard(divided, mesh=mesh["dp"])
    with torch.no_grad():
        for changed in (layers, divided):
            for value in changed.state_dict().values():
                value[1:].mul_(2)
    return wrong + differing_weights(divided, layers)


def test_converted_and_twice_divided_parameters_are_written_to():
    assert not any(run_ranks(other_forms, 4))


@contextmanager
def expected(text: str, wrong: list[str]) -> Iterator[None]:
    try:
        yield
        wrong.append(f"no error: {text}")
    except RuntimeError as error:
        if text not in str(error):
            wrong.append(str(error))


def kept_gathered() -> list[str]:
    """The forward after a write computes with what was written, and what can't be written raises."""
    wrong: list[str] = []
    plain = Model(1).eval()
    model = fully_shard(copy.deepcopy(plain), reshard_after_forward=False).eval()
    model(TOKENS)
    with torch.no_grad():
        for changed in (plain, model):
            changed.state_dict()["body.0.weight"].mul_(2)
    if not torch.equal(model(TOKENS), plain(TOKENS)):
        wrong.append("a forward with old values")
    model.reshard()
    optimizer, state = torch.optim.SGD(model.parameters(), lr=1.0, fused=True), model.state_dict()
    model(TOKENS).sum().backward()
    with expected("the parameters of the root unit are in use", wrong):
        model.unshard()
        state["body.0.weight"].zero_()
    model.reshard()
    optimizer.step()
    with expected("of a state dict was written to, but the model has other values now", wrong):
        for values in state.values():  # Which of them this rank has elements of depends on the layout.
            values.zero_()
    state = model.state_dict()
    model.double()
    with expected("other values now", wrong):
        state["embed.weight"].zero_()
    return wrong


def test_old_values_are_neither_used_nor_written_back():
    assert not any(run_ranks(kept_gathered, 2))


def summoned() -> list[str]:
    wrong: list[str] = []
    for options in OPTIONS:
        plain, model = Model(1), sharded(Model(1), WAYS["units"], **options)
        with torch.no_grad(), model.summon_full_params():
            for changed in (plain, model):
                changed.embed.weight.mul_(2)
                state = changed.state_dict()
                state["embed.weight"].add_(1)
                state["body.0.bias"][0] = 5
                changed.body.state_dict()["2.weight"].zero_()
            wrong += differing_weights(model, plain)
            copies = full_state_dict(model)
            copies["embed.weight"].zero_()
        wrong += differing_weights(model, plain)
        with expected("summon_full_params() is over", wrong):
            state["body.2.weight"].zero_()
        with torch.no_grad(), model.summon_full_params(volatile=True):
            model.state_dict()["embed.weight"].zero_()
        wrong += differing_weights(model, plain)
    return wrong


def test_inside_summon_full_params_the_state_is_that_of_the_parameters():
    assert not any(run_ranks(summoned, 2))


def copies() -> list[str]:
    """What is asked for as a copy does not write, and a copy on one rank alone can't."""
    wrong: list[str] = []
    plain, model = Model(1), sharded(Model(1), WAYS["units"])
    for state in (full_state_dict(model), get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))):
        wrong += [f"{name}: {type(value)}" for name, value in state.items() if type(value) is not Tensor]
        for name in ("embed.weight", "body.0.bias"):
            state[name].zero_()
    full_state_dict(model)["scale"].zero_()
    wrong += differing_weights(model, plain)
    model = FullyShardedDataParallel(Model(1), state_dict_on_rank_0_only=True)
    state = model.state_dict()
    if dist.get_rank() == 0:
        with expected("only rank 0 has this state dict", wrong):
            state["embed.weight"].zero_()
    return wrong + differing_weights(copy.deepcopy(model), plain if dist.get_rank() == 0 else {})


def test_copies_do_not_write_to_the_model():
    assert not any(run_ranks(copies, 2))


def loaded_in_place(folder: str) -> list[str]:
    """`torch.distributed.checkpoint` writes to the tensors that it is given."""
    dcp.save({"model": sharded(Model(2), WAYS["units"]).state_dict()}, checkpoint_id=folder)
    model = sharded(Model(1), WAYS["units"])
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    return differing_weights(model, Model(2))


def test_a_checkpoint_of_torch_loads_into_the_state_in_place(tmp_path: Path):
    assert not any(run_ranks(loaded_in_place, 2, str(tmp_path)))


def saved(folder: str) -> list[str]:
    plain, model = Model(1), sharded(Model(1), WAYS["units"])
    path = f"{folder}/{dist.get_rank()}.pt"
    torch.save(model.state_dict(), path)
    loaded = torch.load(path, weights_only=True)
    wrong = [f"{name}: {type(value)}" for name, value in loaded.items() if type(value) is not Tensor]
    if loaded["embed.weight"].data_ptr() != loaded["head.weight"].data_ptr():
        wrong.append("a tied parameter was saved twice")
    wrong += differing_weights(model, loaded)
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    copied = copy.deepcopy(model.state_dict())
    for value in (*kept.values(), *copied.values()):
        value.zero_()
    return wrong + differing_weights(model, plain)


def test_files_and_copies_of_a_state_are_plain():
    with tempfile.TemporaryDirectory() as folder:
        assert not any(run_ranks(saved, 2, folder))
