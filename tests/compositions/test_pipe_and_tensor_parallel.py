"""Tensor parallelism inside the stages of a pipeline: each stage is computed by two ranks together.

Every rank follows its list of the schedule, and its partner in the stage the same one, so their collectives meet
whatever the schedule does, also where gradients of inputs and of parameters are computed apart.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from scale_core import clip_grad_norm_
from scale_core.sharded_tensor.tensor import local_tensor
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard
from scale_pipe import DistributedPipe, Pipe, StageError, split
from scale_tp import (
    ColumnParallelLinear,
    ParallelLayerNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    load_full_state_dict,
    parallelize,
)

STEPS, CHUNKS = 3, 4


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = ColumnParallelLinear(6, 9, gather_output=False, process_group=group)
        self.down = RowParallelLinear(9, 6, input_is_parallel=True, process_group=group)

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
        self.embed, self.block = VocabParallelEmbedding(7, 6, process_group=group), Block(group)
        self.head = ColumnParallelLinear(6, 7, bias=False, gather_output=True, process_group=group)
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
        pipe = DistributedPipe(split(model, cuts), schedule, chunks=CHUNKS, process_group=mesh["pipe"])
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
    tied = DistributedPipe(split(Words(mesh.get_group("tensor")), ["block"]), chunks=CHUNKS, process_group=mesh["pipe"])
    optimizer = torch.optim.SGD(tied.parameters(), lr=0.1)
    found["words"] = []
    for step in range(STEPS):
        x, target = words_of(step)
        found["words"].append(tied.step(x, target=target, loss_fn=nn.functional.cross_entropy).item())
        found["words"].append(tied.clip_grad_norm_(0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return found


def sequential(divided: bool) -> nn.Sequential:
    """Layers one after the other; divided, some of them on a part of the sequence [batch, sequence, features]."""
    torch.manual_seed(2)
    plain = nn.Sequential(
        nn.Embedding(7, 6), nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Linear(6, 5)
    )
    if not divided:
        return plain
    options: Any = {"process_group": dist.group.WORLD, "sequence_parallel": True}
    layers = nn.Sequential(
        VocabParallelEmbedding(7, 6, **options),
        ParallelLayerNorm(6, process_group=dist.group.WORLD),
        ColumnParallelLinear(6, 9, gather_output=False, **options),
        nn.GELU(),
        RowParallelLinear(9, 6, input_is_parallel=True, **options),
        ColumnParallelLinear(6, 5, **options),
    )
    load_full_state_dict(layers, plain.state_dict())
    return layers


def in_one_process() -> None:
    """Each rank has a pipeline of its own, with its parts of all layers; both clocks tick alike."""
    data = torch.randint(7, (5, 3), generator=torch.Generator().manual_seed(4))
    target = torch.randn(5, 3, 5, generator=torch.Generator().manual_seed(5))
    for checkpoint in ("never", "except_last", "always"):
        found = []
        for divided in (False, True):
            layers = sequential(divided)
            model: nn.Module = layers
            if divided:
                model = Pipe(layers, [2, 2, 2], devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint)
            optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3), []
            for _ in range(STEPS):
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(data), target)
                loss.backward()
                losses += [loss.item(), clip_grad_norm_(list(model.parameters()), 0.1).item()]
                optimizer.step()
            found.append(losses)
        assert found[1] == pytest.approx(found[0], rel=1e-5), checkpoint


def test_the_layers_of_a_pipeline_in_one_process_may_be_divided() -> None:
    run_ranks(in_one_process, 2)


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


@pytest.mark.composition("scale-pipe", "scale-tp")
def test_stages_that_two_ranks_compute_together_train_as_one_process() -> None:
    expected, expected_words = plain(), plain_words()
    for rank, found in enumerate(run_ranks(train, 4)):
        assert found.pop("words") == pytest.approx(expected_words, rel=1e-5), rank
        for schedule, numbers in found.items():
            assert numbers == pytest.approx(expected, rel=1e-5), (rank, schedule)


class Layer(nn.Module):
    """A block whose layers a plan divides."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Plain(nn.Module):
    """A model that is no sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(3, 6), nn.ModuleList(Layer() for _ in range(2)), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


PLANS = {
    "sequence": {"*.norm": "replicate", "*.up": "colwise", "*.down": "rowwise"},
    "split": {"blocks.*.norm": "replicate", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
}


def built(kind: str) -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(3)
    if kind == "split":
        return Plain()
    return nn.Sequential(nn.Linear(3, 6), Layer(), Layer(), nn.Linear(6, 6))


def divided_then_cut() -> tuple[dict[str, list[float]], dict[str, dict[str, Tensor]]]:
    """A plan divides the whole model, and then it is cut; replicas of each stage shard what is left of it."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 4, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    data, replica = mesh["data"].get_group(), mesh["data"].get_local_rank()
    found: dict[str, list[float]] = {}
    states: dict[str, dict[str, Tensor]] = {}
    for kind, schedule in (("sequence", "1f1b"), ("sequence", "zb_v"), ("split", "1f1b")):
        model = parallelize(built(kind), PLANS[kind], mesh["tensor"])
        stages = split(model, ["blocks.1"]) if kind == "split" else model
        balance = None if kind == "split" else [2, 2] if schedule == "1f1b" else [1] * 4
        pipe = DistributedPipe(stages, schedule, balance=balance, chunks=2, process_group=mesh["pipe"])
        if ranks > 4:
            for stage in pipe.stages.values():
                fully_shard(stage, data)
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.05, eps=1e-3)
        numbers = found[f"{kind}, {schedule}"] = []
        for step in range(STEPS):
            x, target = (whole.chunk(mesh["data"].size())[replica] for whole in batch_of(step))
            loss = pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
            if ranks > 4:
                dist.all_reduce(loss, group=data)
            numbers.append(loss.item() / mesh["data"].size())
            numbers.append(pipe.clip_grad_norm_(0.1).item())
            optimizer.step()
            optimizer.zero_grad()
        states[f"{kind}, {schedule}"] = pipe.state_dict(full=True)
    return found, states


def alike_after_all() -> list[str]:
    """Each stage looks in its first forward whether its ranks hold different parts, as the whole model would."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))
    told = []
    for kind, schedule, parts in (("sequence", "1f1b", [2, 2]), ("sequence", "zb_v", [1] * 4), ("split", "1f1b", None)):
        model = parallelize(built(kind), PLANS[kind], mesh["tensor"])
        for param in model.parameters():  # All ranks get the same values, which parts of one parameter never have.
            nn.init.normal_(local_tensor(param), generator=torch.Generator().manual_seed(0))
        pipe = DistributedPipe(
            split(model, ["blocks.1"]) if kind == "split" else model,
            schedule,
            balance=parts,
            process_group=mesh["pipe"],
        )
        x, target = batch_of(0)
        with pytest.raises(StageError) as caught:
            pipe.step(x, target=target, loss_fn=nn.functional.mse_loss)
        told.append(str(caught.value))
    return told


def plain_steps(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model, numbers = built(kind), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)
    for step in range(STEPS):
        x, target = batch_of(step)
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        numbers += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return numbers, model.state_dict()


@pytest.mark.composition("scale-pipe", "scale-tp", "scale-fsdp")
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_model_that_a_plan_has_divided_is_cut_and_sharded_and_trains_as_one_process(ranks: int) -> None:
    expected = {kind: plain_steps(kind) for kind in ("sequence", "split")}
    for rank, (found, states) in enumerate(run_ranks(divided_then_cut, ranks)):
        for title, numbers in found.items():
            losses, weights = expected[title.split(",")[0]]
            assert numbers == pytest.approx(losses, rel=1e-5), title
            # The first rank of each pipeline gets full tensors, in the plain model's order.
            assert list(states[title]) == ([] if rank % 4 > 1 else list(weights)), title
            for name, tensor in states[title].items():
                torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-6, msg=f"{title}: {name}")


def test_stages_of_a_divided_model_notice_that_all_ranks_hold_the_same() -> None:
    for told in run_ranks(alike_after_all, 4):
        assert all("hold the same" in words for words in told), told
