"""state.py of a pipeline: what scale-core's states, snapshots and folders of safetensors see of its stages."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe
from scale_snapshot import load_pretrained, load_snapshot, save_pretrained, save_snapshot


def layers(seed: int) -> nn.Sequential:
    """The first and the last weight are one; there are running statistics, and a stage without parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    model[2].running_mean.uniform_()
    return model


def saved(folder: str) -> list[str]:
    pipe = DistributedPipe(layers(1), balance=[1, 1, 2], chunks=1)
    params = list(pipe.parameters())
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9) if params else None
    for param in params:
        param.grad = torch.ones_like(param)
    if optimizer is not None:
        optimizer.step()
    save_snapshot(folder, 1, sharded_state_dict(pipe, optimizer))
    other = DistributedPipe(layers(2), balance=[2, 1, 1], chunks=1)
    params = list(other.parameters())
    fresh = torch.optim.SGD(params, lr=0.7, momentum=0.9) if params else None
    read = load_snapshot(folder, lambda found: target_state_dict(other, fresh, found))
    load_sharded_state_dict(read.state, other, fresh, copy=False)
    state = sharded_state_dict(other, fresh)
    return [key for key in state if key.startswith(("model.", "optim.")) and "groups" not in key]


def test_a_pipeline_is_saved_in_full_and_read_by_other_stages(tmp_path: Path) -> None:
    first, second, last = run_ranks(saved, 3, str(tmp_path))
    assert first == ["model.0.weight", "optim.0.weight.momentum_buffer"]
    assert second[:2] == ["model.2.weight", "model.2.bias"] and "model.2.running_mean" in second
    assert last == ["model.0.weight", "model.3.bias", "optim.0.weight.momentum_buffer", "optim.3.bias.momentum_buffer"]
    model, expected = layers(3), layers(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9)
    read = load_snapshot(tmp_path, lambda found: target_state_dict(model, optimizer, found))
    load_sharded_state_dict(read.state, model, optimizer, copy=False)
    for name, param in expected.named_parameters():
        assert torch.equal(model.get_parameter(name), param - 0.1), name
    assert torch.equal(model[2].running_mean, expected[2].running_mean)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(optimizer.state[p]["momentum_buffer"], torch.ones_like(p)) for p in model.parameters())


@pytest.mark.ranks(3)
def test_the_full_state_is_a_copy_and_a_stages_own_is_not() -> None:
    pipe = DistributedPipe(layers(1), balance=[1, 1, 2], chunks=1)
    for value in pipe.state_dict(full=True).values():
        value.zero_()
    expected = layers(1).state_dict()
    wrong = [name for name, value in pipe.state_dict().items() if not torch.equal(value, expected[name])]
    for value in pipe.state_dict().values():
        value.zero_()
    assert not wrong + [name for name, value in pipe.state_dict().items() if value.any()]


def load_and_save(folder: str) -> list[str]:
    with torch.device("meta"):
        model = layers(2)
    pipe = DistributedPipe(model, balance=[1, 1, 2], chunks=1)
    load_pretrained(pipe, folder)
    expected = layers(1).state_dict()
    wrong = [name for name, value in pipe.state_dict().items() if not torch.equal(value, expected[name])]
    save_pretrained(pipe, f"{folder} again", max_shard_size=40)
    x, target = torch.ones(2, 3), torch.zeros(2, 3)
    loss = pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
    plain = layers(1)
    wrong += [f"loss {loss}"] * (not torch.equal(loss, nn.functional.mse_loss(plain(x), target).detach()))
    return wrong


def test_each_rank_reads_and_writes_its_own_stages(tmp_path: Path) -> None:
    save_pretrained(layers(1), tmp_path / "hub", max_shard_size=40)
    assert not any(run_ranks(load_and_save, 3, str(tmp_path / "hub")))
    model = layers(3)
    load_pretrained(model, tmp_path / "hub again")
    assert all(torch.equal(value, layers(1).state_dict()[name]) for name, value in model.state_dict().items())
    assert {file.name for file in (tmp_path / "hub").iterdir()} == {
        file.name for file in (tmp_path / "hub again").iterdir()
    }
