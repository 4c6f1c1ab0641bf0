"""Who asks a pipeline what it holds sees the plain model: torch.distributed.checkpoint, optimizers, larger modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_cases import assert_equal, batch, mlp, mse
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from scale_pipe import DistributedPipe, PipelineOptions, split

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """A model with names that a pipeline has itself, in modules that stand on several stages."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stages = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(4))
        self.group = nn.Linear(8, 8)
        self.register_buffer("lost", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        y: torch.Tensor = self.group(x)
        return y


def trained(pipe: DistributedPipe) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
    x, target = batch()
    pipe.step(x, target=target, loss_fn=mse)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def of_all_ranks(own: dict[str, Any]) -> dict[str, Any]:
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    return {name: value for theirs in everyones for name, value in theirs.items()}


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target_stages", [2, 1])
def test_torchs_functions_save_plain_names_and_load_elsewhere(tmp_path: Path, target_stages: int) -> None:
    """A pipeline of four stages, saved; loaded into two stages, of which one is wrapped, or into one process."""
    cuts = [f"stages.{index}" for index in (1, 2, 3)]
    pipe = DistributedPipe(split(Net(), cuts), "zb_v", chunks=2)
    optimizer = trained(pipe)
    model, state = get_model_state_dict(pipe), get_optimizer_state_dict(pipe, optimizer, options=FLAT)
    full, full_state = of_all_ranks(model), of_all_ranks(state)
    assert set(full) == set(Net().state_dict())
    assert_equal(dict(model), dict(pipe.state_dict()))
    model_and_optimizer = get_state_dict(pipe, optimizer)
    assert_equal(dict(model_and_optimizer[0]), dict(model))
    assert set(model_and_optimizer[1]["state"]) == set(dict(pipe.named_parameters()))
    dcp.save({"model": model, "optimizer": state}, checkpoint_id=tmp_path)
    alone = [dist.new_group([index]) for index in range(2)][dist.get_rank()]
    if target_stages == 2:
        other = DistributedPipe(split(Net(1), cuts[1:2]), "1f1b", chunks=2)
        if 1 in other.stages:
            other.stages[1] = DistributedDataParallel(other.stages[1], process_group=alone)
    else:
        other = DistributedPipe(
            [Net(2)], "gpipe", options=PipelineOptions(stages_per_rank=1), chunks=2, process_group=alone
        )
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    target = {
        "model": get_model_state_dict(other),
        "optimizer": get_optimizer_state_dict(other, other_optimizer, options=FLAT),
    }
    dcp.load(target, checkpoint_id=tmp_path)
    set_model_state_dict(other, target["model"])
    set_optimizer_state_dict(other, other_optimizer, target["optimizer"], options=FLAT)
    assert_equal(of_all_ranks(other.state_dict()), full)
    assert_equal(of_all_ranks(get_optimizer_state_dict(other, other_optimizer, options=FLAT)), full_state)
    set_model_state_dict(other, Net(3).state_dict())  # All of it, of which each rank takes its part.
    assert_equal(of_all_ranks(other.state_dict()), dict(Net(3).state_dict()))


def test_a_sequence_in_stages_has_the_numbers_of_its_layers() -> None:
    pipe = DistributedPipe(mlp(), "zb_v", balance=[6, 6])
    plain = mlp()
    assert [name for name, _ in pipe.named_children()] == [name for name, _ in plain.named_children()]
    assert list(pipe.children()) == list(pipe.stages.values())
    assert get_model_state_dict(pipe).keys() == plain.state_dict().keys()
    assert list(pipe.named_parameters(recurse=False)) == list(pipe.named_buffers(recurse=False)) == []
    pipe.apply(lambda module: setattr(module, "seen", True))
    assert all(module.seen for stage in pipe.stages.values() for module in stage.modules())
    pipe.double().eval()
    assert all(param.dtype == torch.float64 for param in pipe.parameters())
    assert not any(module.training for module in pipe.modules())


def test_nothing_is_put_beside_the_stages() -> None:
    pipe = DistributedPipe(mlp(), "1f1b", balance=[12], chunks=2)
    beside: dict[str, Any] = {"loss": nn.CrossEntropyLoss(), "scale": nn.Parameter(torch.ones(1))}
    for name, value in beside.items():
        with pytest.raises(
            TypeError, match=rf"no step of a pipeline would run '{name}'.*add it to the model before you split it"
        ):
            setattr(pipe, name, value)
    with pytest.raises(TypeError, match=r"pipe\.stages\[index\] = wrapper\(pipe\.stages\[index\]\)"):
        for name, child in pipe.named_children():
            pipe.register_module(name, nn.Sequential(child))
    with pytest.raises(TypeError, match="Give a loss function to"):
        pipe.register_buffer("seen", torch.zeros(1))
    pipe.stages[0] = wrapped = nn.Sequential(pipe.stages[0])
    x, target = batch()
    pipe.step(x, target=target, loss_fn=mse)
    assert list(pipe.modules())[1] is wrapped and all(param.grad is not None for param in pipe.parameters())


def test_modules_and_tensors_are_found_by_their_plain_names() -> None:
    pipe = DistributedPipe(split(Net(), ["stages.2"]), "zb_v", chunks=2)
    for name, param in pipe.named_parameters():
        assert pipe.get_parameter(name) is param
    for name, buffer in pipe.named_buffers():
        assert pipe.get_buffer(name) is buffer
    assert pipe.get_submodule("") is pipe and isinstance(pipe.get_submodule("stages.3.1"), nn.BatchNorm1d)
    with pytest.raises(
        AttributeError, match=r"'nothing\.weight' is in no stage of this rank, which holds the stages \[0, 1\]"
    ):
        pipe.get_parameter("nothing.weight")
    with pytest.raises(AttributeError, match=r"'nothing' is in no stage"):
        pipe.get_submodule("nothing")
    averaged = torch.optim.swa_utils.AveragedModel(pipe)
    averaged.update_parameters(pipe)
    assert all(map(torch.equal, averaged.module.parameters(), pipe.parameters()))


def test_a_module_is_found_within_what_is_around_it() -> None:
    pipe = DistributedPipe(mlp(), "1f1b", balance=[12], chunks=2)
    layer = pipe.get_submodule("0")
    path = next(path for path, module in pipe.stages[0].named_modules() if module is layer)
    pipe.stages[0].set_submodule(path, checkpoint_wrapper(layer))
    assert pipe.get_submodule("0") is layer


def test_a_pipeline_in_a_larger_module_is_saved_with_it() -> None:
    def outer(seed: int) -> nn.Module:
        pipe = DistributedPipe(split(Net(seed), ["stages.2"]), "zb_v", chunks=2)
        return nn.ModuleDict({"pipe": pipe, "beside": nn.Linear(2, 2)})

    first, second = outer(0), outer(1)
    state = first.state_dict()
    assert {f"pipe.{name}" for name in Net().state_dict()} < state.keys()
    second.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in second.state_dict().items())
    with pytest.raises(RuntimeError, match=r"Missing key.*group\.weight"):
        second.load_state_dict({name: value for name, value in state.items() if name != "pipe.group.weight"})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*typo"):
        second.load_state_dict({**state, "pipe.typo": torch.ones(1)})
