"""The self-test on every rank: a sharded step compared with one of a plain process, and the speed of the link."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import all_gather, all_reduce, reduce_scatter
from scale_core.comm.group import Group
from scale_fsdp import full_state_dict, fully_shard
from scale_tools.doctor.environment import best_seconds

LR, SAMPLES, WIDTH = 0.1, 4, 32
MOST_DIFFERENCE = 1e-5
SENT_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}


@dataclass(frozen=True)
class SelfTest:
    """The results of the ranks.

    Attributes:
        backend: Their backend.
        ranks: Number of ranks.
        difference: The largest one between a weight after a sharded step and after a plain one.
        bytes_per_second: By collective, the bytes that one rank sends in a second.
    """

    backend: str
    ranks: int
    difference: float
    bytes_per_second: dict[str, float]

    @property
    def is_right(self) -> bool:
        return self.difference <= MOST_DIFFERENCE  # NaN is not.


def run_self_test(group: Group, device: torch.device) -> SelfTest:
    """Trains one step and measures; called on all ranks of a group."""
    return SelfTest(group.backend, group.size, step_difference(group, device), link_rates(group, device))


def step_difference(group: Group, device: torch.device) -> float:
    """Returns the largest difference between one step of `fully_shard` on these ranks and one of a plain process."""
    sharded, plain = _model(device), _model(device)
    for layer in sharded:
        fully_shard(layer, group.process_group)
    fully_shard(sharded, group.process_group)
    batch = torch.randn(group.size * SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    _step(sharded, batch[group.rank * SAMPLES :][:SAMPLES])
    _step(plain, batch)
    expected = plain.state_dict()
    differences = [(value.to(device) - expected[name]).abs().max() for name, value in full_state_dict(sharded).items()]
    return float(torch.stack(differences).max())


def _model(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.LayerNorm(2 * WIDTH), nn.Linear(2 * WIDTH, 1)).to(device)


def _step(model: nn.Module, batch: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    loss: Tensor = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    optimizer.step()


def link_rates(group: Group, device: torch.device) -> dict[str, float]:
    """Returns for each collective the bytes that one rank sends in a second."""
    size, num = group.size, SENT_BYTES[device.type] // 4 // group.size * group.size
    full, shard = torch.ones(num, device=device), torch.ones(num // group.size, device=device)
    part = full.nbytes * (size - 1) / size
    return {
        "all_reduce": 2 * part / best_seconds(lambda: all_reduce(full, group, op="max").wait(), device, times=3),
        "all_gather": part / best_seconds(lambda: all_gather(full, shard, group).wait(), device, times=3),
        "reduce_scatter": part / best_seconds(lambda: reduce_scatter(full, group).wait(), device, times=3),
    }
