"""A training that saves, ends and is resumed has the losses and weights of one that nothing interrupts, to the bit."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import scale_snapshot


class Training:
    def __init__(self, num_ranks: int) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        self.model = DistributedDataParallel(model) if num_ranks > 1 else model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1, amsgrad=True)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=8)

    @property
    def objects(self) -> dict[str, object]:
        random = scale_snapshot.RandomState()
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "random": random}

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            self.optimizer.zero_grad()
            loss = self.model(torch.arange(24.0, dtype=torch.float64).reshape(6, 4).sub(step).sin()).square().mean()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            losses.append(loss.item())
        return losses

    def tensors(self) -> list[Tensor]:
        return [*self.model.state_dict().values(), *(self.optimizer.state_dict()["state"][0].values())]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("in_background", [False, True])
def test_a_resumed_training_is_the_unbroken_one(tmp_path: Path, num_ranks: int, in_background: bool) -> None:
    unbroken = Training(num_ranks)
    losses = unbroken.train(range(6))
    first = Training(num_ranks)
    begun = first.train(range(3))
    if in_background:
        scale_snapshot.async_save(tmp_path, 3, first.objects).wait()
    else:
        scale_snapshot.save(tmp_path, 3, first.objects)
    begun += first.train(range(3, 4))  # a step after the save, which is lost
    resumed = Training(num_ranks)
    step = scale_snapshot.load(tmp_path, resumed.objects).step
    assert begun[:3] + resumed.train(range(step, 6)) == losses
    assert all(map(torch.equal, resumed.tensors(), unbroken.tensors()))
