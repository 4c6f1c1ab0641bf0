"""A buffer that is equal on all ranks and has changed on one of them is found without being asked for."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from shard_arguments import shard_arguments
from torch import Tensor, nn

from scale_core import DivergenceError
from scale_fsdp import fully_shard


@pytest.mark.fault(115)
@pytest.mark.ranks(2)
def test_a_buffer_that_changed_on_one_rank_is_named_on_all() -> None:
    class Scaled(nn.Module):
        table: Tensor
        mean: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("table", torch.ones(4))
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            return self.norm(self.linear(x)) * self.table

    def train(flips: bool, passes: int = 103, **options: int) -> str:
        torch.manual_seed(0)
        model = Scaled()
        fully_shard(model, **shard_arguments(**options))
        torch.manual_seed(dist.get_rank())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(passes):
            try:
                model(torch.randn(3, 4)).square().mean().backward()
            except DivergenceError as error:
                return f"{number}: {error}"
            optimizer.step()
            optimizer.zero_grad()
            if flips and number == 50 and dist.get_rank() == 1:
                model.table[2] += 0.5
        return "nothing"

    said = {
        "default": train(flips=True),
        "each": train(flips=True, check_replicas_every=1),
        "never": train(flips=True, check_replicas_every=0),
        "alike": train(flips=False, passes=20, check_replicas_every=1),
    }
    assert said["default"].startswith("100: ") and "'table': " in said["default"]
    assert said["each"].startswith("51: ") and "'table': " in said["each"]
    assert said["never"] == said["alike"] == "nothing"
