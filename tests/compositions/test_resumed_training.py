"""A training of several packages, resumed from a snapshot, equals the one that was never interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import scale_snapshot
from scale_adascale import AdaScale
from scale_core import ShardedGradScaler
from scale_fsdp import FullyShardedDataParallel, OffloadOptimizer, ShardedEMA, fully_shard
from scale_oss import OSS, ShardedDataParallel


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
            "random": scale_snapshot.RandomState(),
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


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize(
    "way, in_background",
    [
        ("fsdp", True),
        ("flat fsdp with AdaScale", False),
        ("offloaded", True),
        ("oss", False),
        ("sharded ddp with AdaScale", True),
    ],
)
@pytest.mark.ranks(2, in_turn=True)
def test_a_resumed_training_equals_one_that_never_stopped(way: str, in_background: bool, tmp_path: Path) -> None:
    training = Training(way, seed=0)
    training.run(5)
    saving = (scale_snapshot.async_save if in_background else scale_snapshot.save)(tmp_path, 5, training.objects)
    expected = training.run(4)
    if isinstance(saving, scale_snapshot.AsyncSave):
        saving.wait()
    other = Training(way, seed=1)
    assert scale_snapshot.load(tmp_path, other.objects).step == 5
    resumed = other.run(4)
    assert len(resumed) == len(expected) and all(map(torch.equal, resumed, expected))
