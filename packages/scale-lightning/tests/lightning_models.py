"""A LightningModule, the same training by a plain loop in one process, and how a rank's Trainer is set up."""

import os
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

SAMPLES, BATCH = 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.outer = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Net(LightningModule):
    """Two blocks, and a parameter of its own that only the steps read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(Block(), Block())
        self.factor = nn.Parameter(torch.ones(3))

    def loss(self, batch: Any) -> torch.Tensor:
        (x,) = batch
        return (self.net(x).float() * self.factor.sum() - x.sum(1, keepdim=True)).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def samples() -> torch.Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(5))


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(samples()), batch_size=BATCH)


def environment() -> TorchElasticEnvironment:
    """That of a rank whose process group is there already, so that Lightning starts none."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size, GROUP_RANK="0")
    return TorchElasticEnvironment()


def trainer(strategy: Any, epochs: int = 1, **options: Any) -> Trainer:
    plugins = [environment(), *options.pop("plugins", [])]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_epochs=epochs,
        plugins=plugins,
        **{**quiet, "enable_model_summary": False, **options},
    )


def batches(ranks: int, epoch: int | None = None) -> list[list[torch.Tensor]]:
    """For each step of an epoch, the batch of each rank: shuffled as Lightning trains, or in order (None)."""
    dealt = []
    for rank in range(ranks):
        sampler: Any = DistributedSampler(TensorDataset(samples()), ranks, rank, shuffle=epoch is not None)
        sampler.set_epoch(epoch or 0)
        dealt.append(samples()[list(sampler)].split(BATCH))
    return [list(step) for step in zip(*dealt, strict=True)]


def plain_training(
    epochs: list[int], *, accumulate: int = 1, clip: float | None = None, autocast: bool = False, shuffle: bool = True
) -> tuple[Net, torch.optim.Optimizer]:
    """Each epoch by as many ranks as it says, in one process: gradients summed in rank order, then divided."""
    model = Net()
    built = model.configure_optimizers()
    optimizer, scheduler = built["optimizer"], built["lr_scheduler"]["scheduler"]
    params = list(model.parameters())
    for epoch, ranks in enumerate(epochs):
        steps = batches(ranks, epoch if shuffle else None)
        for first in range(0, len(steps), accumulate):
            total: list[Any] = [None] * len(params)
            for rank in range(ranks):
                optimizer.zero_grad()
                for step in steps[first : first + accumulate]:
                    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False) if autocast else nullcontext():
                        loss = model.loss((step[rank],))
                    (loss / accumulate).backward()
                total = [p.grad if t is None else t + p.grad for t, p in zip(total, params, strict=True)]
            for param, grad in zip(params, total, strict=True):
                param.grad = grad / ranks
            if clip is not None:
                nn.utils.clip_grad_norm_(params, clip)
            optimizer.step()
            scheduler.step()
    return model, optimizer


def assert_equal(state: Any, expected: Any, tolerance: float = 0.0) -> None:
    """Compares state dicts, tensors and numbers, by their names."""
    if isinstance(expected, dict):
        assert state.keys() == expected.keys()
        for key in expected:
            assert_equal(state[key], expected[key], tolerance)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(state, expected, rtol=tolerance, atol=tolerance)
    else:
        assert state == expected
