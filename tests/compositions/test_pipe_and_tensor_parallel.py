"""Tensor parallelism inside the stages of a pipeline: each stage is computed by two ranks together.

Every rank follows its list of the schedule, and its partner in the stage the same one, so their collectives meet
whatever the schedule does, also where gradients of inputs and of parameters are computed apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from trainings import Block, Net, assert_parity, drawn, recorded, train
from with_options import with_options

from scale_check.recording import Key, Phase, Recording
from scale_core import clip_grad_norm_
from scale_core.comm.group import Group, GroupLike
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import fully_shard
from scale_pipe import DistributedPipe, Pipe, StageError, split
from scale_tp import (
    ColumnParallelLinear,
    LayerOptions,
    ParallelLayerNorm,
    RowParallelLinear,
    VocabParallelEmbedding,
    load_full_state_dict,
    parallelize,
)

STEPS, CHUNKS, WORDS = 3, 4, 7


class DividedBlock(nn.Module):
    def __init__(self, group: GroupLike) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = ColumnParallelLinear(6, 9, gather_output=False, process_group=group)
        self.down = RowParallelLinear(9, 6, input_is_parallel=True, process_group=group)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Words(nn.Module):
    """A model of words whose first and last weight are one, divided among ranks in both places."""

    def __init__(self, group: GroupLike = None) -> None:
        super().__init__()
        torch.manual_seed(1)  # All ranks draw the same weights, of which each keeps its part.
        self.embed, self.block = VocabParallelEmbedding(WORDS, 6, process_group=group), DividedBlock(group)
        self.head = ColumnParallelLinear(6, WORDS, bias=False, gather_output=True, process_group=group)
        self.head.weight = self.embed.weight
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        y: Tensor = self.head(self.block(self.embed(words)))
        return y


def net(group: GroupLike = None) -> nn.Module:
    return Net(4, outputs=6, block=lambda: DividedBlock(group))


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    x, target = drawn(step, (8, 3), (8, 6))
    return x, target


def words_of(step: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(WORDS, (8, 2), generator=torch.Generator().manual_seed(step))
    return words[:, 0], words[:, 1]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-3)


Batches = Callable[[int], tuple[Tensor, Tensor]]
Optimizers = Callable[[nn.Module], torch.optim.Optimizer]


def train_plain(
    model: nn.Module, batches: Batches, loss_of: Any, make: Optimizers = sgd, clip: float = 0.5
) -> Recording:
    """Losses, norms by which is clipped and largest gradients of some steps on one process, and of an evaluation."""
    optimizer, losses, norms, params = make(model), [], [], list(model.parameters())
    for step in range(STEPS):
        x, target = batches(step)
        loss = loss_of(model(x), target)
        loss.backward()
        losses.append(loss.item())
        norms.append([nn.utils.clip_grad_norm_(params, clip).item()])
        norms[-1].append(nn.utils.clip_grad_norm_(params, math.inf, math.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    x, target = batches(STEPS)
    return recorded([*losses, loss_of(model(x), target).item()], model.state_dict(), norms=norms)


def train_pipe(
    pipe: DistributedPipe, batches: Batches, loss_of: Any, make: Optimizers = sgd, clip: float = 0.5
) -> Recording:
    optimizer, losses, norms = make(pipe), [], []
    for step in range(STEPS):
        x, target = batches(step)
        losses.append(pipe.step(x, target=target, loss_fn=loss_of).item())
        norms.append([pipe.clip_grad_norm_(clip).item(), pipe.clip_grad_norm_(math.inf, math.inf).item()])
        optimizer.step()
        optimizer.zero_grad()
    x, target = batches(STEPS)
    return recorded([*losses, pipe.evaluate(x, target=target, loss_fn=loss_of).item()], norms=norms)


def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipe", "tensor"))


@pytest.mark.composition("scale-pipe", "scale-tp")
@pytest.mark.parametrize(
    "schedule, cuts", [("1f1b", ["blocks.2"]), ("zb_v", ["blocks.1", "blocks.2", "blocks.3"])], ids=["1f1b", "zb_v"]
)
@pytest.mark.ranks(4, in_turn=True)
def test_stages_that_two_ranks_compute_train_as_one_process(schedule: str, cuts: list[str]) -> None:
    mesh = two_axes()
    stages = split(net(mesh.get_group("tensor")), cuts)
    pipe = DistributedPipe(stages, schedule, chunks=CHUNKS, process_group=mesh["pipe"])
    of_ranks = by_rank(train_pipe(pipe, batch_of, F.mse_loss))
    assert_parity(without_weights(train_plain(net(Group()), batch_of, F.mse_loss)), of_ranks, rel=1e-6)


def without_weights(recording: Recording) -> Recording:
    return Recording({key: tensor for key, tensor in recording.tensors.items() if key.phase is not Phase.WEIGHT})


def weights_of(recording: Recording) -> Recording:
    return Recording({key: tensor for key, tensor in recording.tensors.items() if key.phase is Phase.WEIGHT})


@pytest.mark.composition("scale-pipe", "scale-tp")
@pytest.mark.ranks(4, in_turn=True)
def test_a_divided_weight_of_two_stages_trains_as_one() -> None:
    mesh = two_axes()
    stages = split(Words(mesh.get_group("tensor")), ["block"])
    pipe = DistributedPipe(stages, chunks=CHUNKS, process_group=mesh["pipe"])
    of_ranks = by_rank(train_pipe(pipe, words_of, F.cross_entropy))
    plain = train_plain(Words(Group()), words_of, F.cross_entropy)
    assert_parity(without_weights(plain), of_ranks, rel=1e-6)


def sequential(divided: bool) -> nn.Sequential:
    """Layers one after the other; divided, some of them on a part of the sequence [batch, sequence, features]."""
    torch.manual_seed(2)
    plain = nn.Sequential(
        nn.Embedding(WORDS, 6), nn.LayerNorm(6), nn.Linear(6, 9), nn.GELU(), nn.Linear(9, 6), nn.Linear(6, 5)
    ).double()
    if not divided:
        return plain
    options: Any = {"process_group": dist.group.WORLD, "sequence_parallel": True}
    layers = nn.Sequential(
        VocabParallelEmbedding(WORDS, 6, **with_options(LayerOptions, **options)),
        ParallelLayerNorm(6, process_group=dist.group.WORLD),
        ColumnParallelLinear(6, 9, **with_options(LayerOptions, gather_output=False, **options)),
        nn.GELU(),
        RowParallelLinear(9, 6, **with_options(LayerOptions, input_is_parallel=True, **options)),
        ColumnParallelLinear(6, 5, **with_options(LayerOptions, **options)),
    ).double()
    load_full_state_dict(layers, plain.state_dict())
    return layers


@pytest.mark.parametrize("checkpoint", ["never", "except_last", "always"])
@pytest.mark.ranks(2, in_turn=True)
def test_layers_of_a_pipeline_in_one_process_may_be_divided(checkpoint: str) -> None:
    """Each rank has a pipeline of its own, with its parts of all layers; both clocks tick alike."""
    data = torch.randint(WORDS, (5, 3), generator=torch.Generator().manual_seed(4))
    (target,) = drawn(5, (5, 3, 5))
    recordings = []
    for divided in (False, True):
        model: nn.Module = sequential(divided)
        if divided:
            model = Pipe(model, [2, 2, 2], devices=["cpu"] * 3, chunks=2, checkpoint=checkpoint)
        optimizer, params = adamw(model), list(model.parameters())
        clip = partial(clip_grad_norm_, params, 0.1)
        recordings.append(train(model, optimizer, lambda m, step: F.mse_loss(m(data), target), range(STEPS), clip=clip))
    assert_parity(recordings[0], recordings[1:], rel=1e-6)


PLANS = {
    "sequence": {"*.norm": "replicate", "*.up": "colwise", "*.down": "rowwise"},
    "split": {"blocks.*.norm": "replicate", "blocks.*.up": "colwise", "blocks.*.down": "rowwise"},
}
WAYS = [("sequence", "1f1b"), ("sequence", "zb_v"), ("split", "1f1b")]


def built(kind: str) -> nn.Module:
    """A model whose blocks a plan divides; the same on all ranks, and a sequence or not."""
    if kind == "split":
        return Net(2, outputs=6, block=lambda: Block(6, 8), seed=3)
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 6), Block(6, 8), Block(6, 8), nn.Linear(6, 6)).double()


def cut(model: nn.Module, kind: str, schedule: str, ranks: DeviceMesh) -> DistributedPipe:
    stages = split(model, ["blocks.1"]) if kind == "split" else model
    balance = None if kind == "split" else [2, 2] if schedule == "1f1b" else [1] * 4
    return DistributedPipe(stages, schedule, balance=balance, chunks=2, process_group=ranks)


@pytest.mark.composition("scale-pipe", "scale-tp", "scale-fsdp")
@pytest.mark.parametrize("kind, schedule", WAYS)
@pytest.mark.ranks(4, 8, in_turn=True)
def test_a_divided_model_is_cut_and_sharded(kind: str, schedule: str) -> None:
    """A plan divides the whole model, and then it is cut; replicas of each stage shard what is left of it."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks // 4, 2, 2), mesh_dim_names=("data", "pipe", "tensor"))
    pipe = cut(parallelize(built(kind), PLANS[kind], mesh["tensor"]), kind, schedule, mesh["pipe"])
    if ranks > 4:
        for stage in pipe.stages.values():
            fully_shard(stage, mesh["data"].get_group())

    def batches(step: int) -> tuple[Tensor, Tensor]:
        x, target = (whole.chunk(mesh["data"].size())[mesh["data"].get_local_rank()] for whole in batch_of(step))
        return x, target

    trained = train_pipe(pipe, batches, F.mse_loss, adamw, 0.1)
    state = pipe.state_dict(full=True)
    # The first rank of each pipeline gets full tensors, in the plain model's order.
    assert list(state) == ([] if dist.get_rank() % 4 > 1 else list(built(kind).state_dict()))
    trained.tensors |= {Key(STEPS + 1, Phase.WEIGHT, name): tensor.clone() for name, tensor in state.items()}

    expected, of_ranks = train_plain(built(kind), batch_of, F.mse_loss, adamw, 0.1), by_rank(trained)
    assert_parity(without_weights(expected), [without_weights(each) for each in of_ranks], rel=1e-6)
    states = [weights_of(each) for each in of_ranks if weights_of(each).tensors]
    assert len(states) == ranks // 2
    assert_parity(weights_of(expected), states, rel=1e-6)


@pytest.mark.parametrize("kind, schedule", WAYS)
@pytest.mark.ranks(4, in_turn=True)
def test_stages_notice_that_all_ranks_hold_the_same(kind: str, schedule: str) -> None:
    """Each stage looks in its first forward whether its ranks hold different parts, as the whole model would."""
    mesh = two_axes()
    model = parallelize(built(kind), PLANS[kind], mesh["tensor"])
    for param in model.parameters():  # All ranks get the same values, which parts of one parameter never have.
        nn.init.normal_(local_tensor(param), generator=torch.Generator().manual_seed(0))
    x, target = batch_of(0)
    with pytest.raises(StageError, match="hold the same"):
        cut(model, kind, schedule, mesh["pipe"]).step(x, target=target, loss_fn=F.mse_loss)
