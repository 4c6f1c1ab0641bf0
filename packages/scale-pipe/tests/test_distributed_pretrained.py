"""Folders of safetensors files, in and out of the stages of a pipeline."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from scale_core import load_pretrained, save_pretrained
from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe


def layers(seed: int) -> nn.Sequential:
    """The first and the last weight are one; there are running statistics, and a stage without parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[3].weight = model[0].weight
    model[2].running_mean.uniform_()
    return model


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
