"""Tensor parallelism inside the stages of a pipeline: two stages, each computed by two ranks together.

Every rank follows its list of the schedule, and its partner in the stage the same one, so their collectives meet
whatever the schedule does, also where gradients of inputs and of parameters are computed apart.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scale_core.testing import run_ranks

pytest.importorskip("scale_pipe")
pytest.importorskip("scale_tp")
from scale_pipe import DistributedPipe, split
from scale_tp import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

STEPS, CHUNKS = 3, 4


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = ColumnParallelLinear(6, 9, gather_output=False, group=group)
        self.down = RowParallelLinear(9, 6, input_is_parallel=True, group=group)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)  # All ranks draw the same weights, of which each keeps its part.
        self.embed, self.blocks = nn.Linear(3, 6), nn.ModuleList(Block(group) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x


class Words(nn.Module):
    """A model of words whose first and last weight are one, divided among ranks in both places."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.block = VocabParallelEmbedding(7, 6, group=group), Block(group)
        self.head = ColumnParallelLinear(6, 7, bias=False, gather_output=True, group=group)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.embed(words)))
        return y


def words_of(step: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(7, (8, 2), generator=torch.Generator().manual_seed(step))
    return words[:, 0], words[:, 1]


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 6, generator=generator)


def train() -> dict[str, list[float]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))
    found: dict[str, list[float]] = {}
    for schedule, cuts in (("1f1b", ["blocks.2"]), ("zb_v", ["blocks.1", "blocks.2", "blocks.3"])):
        model = Net(mesh.get_group("tensor"))
        pipe = DistributedPipe(split(model, cuts), schedule, chunks=CHUNKS, group=mesh["pipe"])
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        found[schedule] = []
        for step in range(STEPS):
            x, target = batch_of(step)
            found[schedule].append(pipe.step(x, target=target, loss_fn=nn.functional.mse_loss).item())
            found[schedule].append(pipe.clip_grad_norm_(0.5).item())
            found[schedule].append(pipe.clip_grad_norm_(math.inf, math.inf).item())
            optimizer.step()
            optimizer.zero_grad()
        x, target = batch_of(STEPS)
        found[schedule].append(pipe.evaluate(x, target=target, loss_fn=nn.functional.mse_loss).item())
    tied = DistributedPipe(split(Words(mesh.get_group("tensor")), ["block"]), chunks=CHUNKS, group=mesh["pipe"])
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
    found["words"] = []
    for step in range(STEPS):
        x, target = words_of(step)
        found["words"].append(tied.step(x, target=target, loss_fn=nn.functional.cross_entropy).item())
        found["words"].append(tied.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def plain() -> list[float]:
    model, found = Net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, target = batch_of(step)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        found += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        found.append(nn.utils.clip_grad_norm_(model.parameters(), math.inf, math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    x, target = batch_of(STEPS)
    return [*found, nn.functional.mse_loss(model(x), target).item()]


def plain_words() -> list[float]:
    model, found = Words(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, target = words_of(step)
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        found += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_stages_that_two_ranks_compute_together_train_as_one_process() -> None:
    expected, expected_words = plain(), plain_words()
    for rank, found in enumerate(run_ranks(train, 4)):
        assert found.pop("words") == pytest.approx(expected_words, rel=1e-5), rank
        for schedule, numbers in found.items():
            assert numbers == pytest.approx(expected, rel=1e-5), (rank, schedule)
