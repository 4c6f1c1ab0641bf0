"""A training of several packages, resumed from a snapshot, equals the one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from scale_adascale import AdaScale
from scale_core import ShardedGradScaler, snapshot
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, OffloadOptimizer, ShardedEMA, fully_shard
from scale_oss import OSS, ShardedDataParallel

WAYS = ("fsdp", "flat fsdp with AdaScale", "offloaded", "oss", "sharded ddp with AdaScale")


class Data:
    """A position in this rank's part of the data."""

    def __init__(self) -> None:
        self.position = 10 * dist.get_rank()

    def __next__(self) -> Tensor:
        self.position += 1
        return torch.linspace(-1, self.position, 24).view(4, 6).sin()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Training:
    """A model with dropout, trained in one of the ways."""

    def __init__(self, way: str, seed: int) -> None:
        torch.manual_seed(seed)
        model: nn.Module = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Dropout(0.3), nn.Linear(9, 3))
        self.optimizer: Optimizer
        if "oss" in way or "ddp" in way:
            self.optimizer = OSS(model.parameters(), AdamW, lr=0.01)
            self.model: nn.Module = ShardedDataParallel(model, self.optimizer)
        elif "flat" in way:
            self.model = FullyShardedDataParallel(model, flatten_parameters=True)
            self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        else:
            self.model = fully_shard(model)
            self.optimizer = AdamW(model.parameters(), lr=0.01)
        if way == "offloaded":
            self.optimizer = OffloadOptimizer(AdamW, self.model.parameters(), host_fraction=0.5, lr=0.01)
        if "AdaScale" in way:
            self.optimizer = AdaScale(self.optimizer)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.scaler = ShardedGradScaler(init_scale=2.0**30, growth_interval=2, enabled="AdaScale" not in way)
        self.ema = ShardedEMA(self.model, 0.9) if "fsdp" in way else None
        self.data = Data()
        torch.manual_seed(seed + dist.get_rank())

    @property
    def objects(self) -> dict[str, Any]:
        objects = {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "data": self.data,
            "random": snapshot.RandomState(),
        }
        return objects if self.ema is None else {**objects, "ema": self.ema}

    def run(self, num_steps: int) -> list[Tensor]:
        seen = []
        for _ in range(num_steps):
            loss = self.model(next(self.data)).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()
            if self.ema is not None:
                self.ema.update()
            seen.append(loss.detach())
        averages = [] if self.ema is None else [average.clone() for average in self.ema.averages.values()]
        return [*seen, *(param.detach().clone() for param in self.model.parameters()), *averages]


def resumed_and_uninterrupted(folder: Path, way: str, background: bool) -> list[str]:
    training = Training(way, seed=0)
    training.run(5)
    saving = (snapshot.async_save if background else snapshot.save)(folder, 5, training.objects)
    expected = training.run(4)
    if isinstance(saving, snapshot.AsyncSave):
        saving.wait()
    other = Training(way, seed=1)
    assert snapshot.load(folder, other.objects).step == 5
    found = other.run(4)
    assert len(found) == len(expected)
    return [
        f"{way}: {number}" for number, pair in enumerate(zip(found, expected, strict=True)) if not torch.equal(*pair)
    ]


def all_ways(folder: Path) -> list[str]:
    wrong = []
    for number, way in enumerate(WAYS):
        wrong += resumed_and_uninterrupted(folder / str(number), way, background=number % 2 == 0)
    return wrong


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_training_resumed_from_a_snapshot_equals_the_one_that_was_never_interrupted(tmp_path: Path) -> None:
    assert run_ranks(all_ways, 2, tmp_path) == [[], []]
