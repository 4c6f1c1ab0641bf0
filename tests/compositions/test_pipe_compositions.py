"""scale-pipe with data parallelism across replicas of the pipeline, and with checkpointed parts of stages.

Four ranks are two pipelines of two ranks. Each replica of a stage is wrapped in one way or the other; whatever wraps
it, two steps equal plain PyTorch: each replica's gradients accumulated over its micro-batches, and their mean stepped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from trainings import Block, Net, assert_parity, drawn, recorded

from scale_checkpoint import checkpoint_wrapper
from scale_core import ShardedGradScaler
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, ShardOptions, full_state_dict, fully_shard
from scale_oss import OSS, ShardedDataParallel
from scale_pipe import DistributedPipe, StageError, split

CHUNKS, WORDS = 4, 7
LR, MAX_NORM = 0.5, 0.1


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    x, target = drawn(10 * step + replica, (8, 3), (8, 2))
    return x, target


def words_of(step: int, replica: int) -> Tensor:
    """Words and their targets, [8, 2]."""
    return torch.randint(WORDS, (8, 2), generator=torch.Generator().manual_seed(10 * step + replica))


Kind = Literal["SGD", "AdamW"]
Wrap = Callable[[DistributedPipe, dist.ProcessGroup, Kind], list[torch.optim.Optimizer]]
"""Wraps the stages of a pipeline for the replicas of it; returns what steps them."""

KINDS: Mapping[Kind, Any] = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}
OPTIONS: Mapping[Kind, Mapping[str, float]] = {"SGD": {"lr": LR}, "AdamW": {"lr": 0.05, "eps": 1e-6}}


def with_ddp(pipe: DistributedPipe, replicas: dist.ProcessGroup, kind: Kind = "SGD") -> list[torch.optim.Optimizer]:
    for index, stage in pipe.stages.items():
        pipe.stages[index] = DistributedDataParallel(stage, process_group=replicas)
    return [KINDS[kind](pipe.parameters(), **OPTIONS[kind])]


def with_fsdp(pipe: DistributedPipe, replicas: dist.ProcessGroup, kind: Kind = "SGD") -> list[torch.optim.Optimizer]:
    for stage in pipe.stages.values():
        for module in [*stage.modules()][::-1]:
            if isinstance(module, Block) and any(True for _ in module.parameters()):
                fully_shard(module, replicas)
        fully_shard(stage, replicas)
    return [KINDS[kind](pipe.parameters(), **OPTIONS[kind])]


def with_oss(pipe: DistributedPipe, replicas: dist.ProcessGroup, kind: Kind = "SGD") -> list[torch.optim.Optimizer]:
    optimizers: list[torch.optim.Optimizer] = []
    for index, stage in pipe.stages.items():
        optimizer = OSS(stage.parameters(), KINDS[kind], replicas, **OPTIONS[kind])
        pipe.stages[index] = ShardedDataParallel(stage, optimizer, replicas)
        optimizers.append(optimizer)
    return optimizers


def with_tied_units(pipe: DistributedPipe, replicas: dist.ProcessGroup, kind: Kind) -> list[torch.optim.Optimizer]:
    """The modules that share a weight are units of their own, so that its parts are the same in both stages."""
    for stage in pipe.stages.values():
        for module in (stage.embed, stage.head):
            if isinstance(module, nn.Module) and any(True for _ in module.parameters()):
                fully_shard(module, replicas)
    return with_fsdp(pipe, replicas, kind)


def with_ddp_and_fsdp(pipe: DistributedPipe, replicas: dist.ProcessGroup, kind: Kind) -> list[torch.optim.Optimizer]:
    return (with_ddp if 0 in pipe.stages else with_fsdp)(pipe, replicas, kind)


def with_checkpoints_in_ddp(
    pipe: DistributedPipe, replicas: dist.ProcessGroup, kind: Kind
) -> list[torch.optim.Optimizer]:
    for stage in pipe.stages.values():
        for module in stage.modules():
            if isinstance(module, Block) and any(True for _ in module.parameters()):
                checkpoint_wrapper(module)
    return with_ddp(pipe, replicas, kind)


WAYS: Mapping[str, Wrap] = {
    "ddp": with_ddp,
    "fsdp": with_fsdp,
    "oss": with_oss,
    "checkpoints": with_checkpoints_in_ddp,
}
TIED_WAYS: Mapping[str, Wrap] = {
    "ddp": with_ddp,
    "fsdp": with_fsdp,
    "units": with_tied_units,
    "ddp and fsdp": with_ddp_and_fsdp,
    "oss": with_oss,
}
SCHEDULES = {"1f1b": ["blocks.2"], "zb_v": ["blocks.1", "blocks.2", "blocks.3"]}


def mesh_of_two() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))


def full_weights(pipe: DistributedPipe) -> dict[str, Tensor]:
    """The full parameters of this rank's stages, by the names of the model."""
    state: dict[str, Tensor] = {}
    for stage in pipe.stages.values():
        plain = stage.module if isinstance(stage, DistributedDataParallel | ShardedDataParallel) else stage
        state |= full_state_dict(plain)
    return state


def fail(pipe: DistributedPipe, x: Tensor, target: Tensor, loss_of: Any) -> None:
    """A step that fails with the last micro-batch: whatever wraps the stages, what was accumulated stays as it is."""
    computed: list[Tensor] = []

    def failing(output: Tensor, to: Tensor) -> Tensor:
        computed.append(output)
        if len(computed) == CHUNKS:
            raise OSError("no loss")
        loss: Tensor = loss_of(output, to)
        return loss

    with pytest.raises(StageError, match="no loss"):
        pipe.step(x, target=target, loss_fn=failing)


def train_plainly() -> tuple[list[list[float]], list[float], dict[str, Tensor]]:
    """Losses of each replica, those of the evaluation, and weights."""
    model, losses, mse = Net(), [[0.0, 0.0], [0.0, 0.0]], nn.functional.mse_loss
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(2):
        grads = []
        for replica in range(2):
            model.zero_grad()
            for x, target in zip(*(whole.chunk(CHUNKS) for whole in batch_of(step, replica)), strict=True):
                loss = mse(model(x), target) / CHUNKS
                loss.backward()
                losses[replica][step] += loss.item()
            grads.append([param.grad for param in model.parameters()])
        for param, one, other in zip(model.parameters(), *grads, strict=True):
            param.grad = (one + other) / 2
        optimizer.step()
    judged = [mse(model(x), target).item() for x, target in (batch_of(2, replica) for replica in range(2))]
    return losses, judged, model.state_dict()


@pytest.mark.composition("scale-pipe", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "ShardedDataParallel")
@pytest.mark.composition("scale-pipe", "DistributedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-pipe")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.ranks(4, in_turn=True)
def test_stages_with_replicas_train_as_one_process(way: str, schedule: str) -> None:
    """Losses of two steps, that of an evaluation, and weights."""
    mesh, mse = mesh_of_two(), nn.functional.mse_loss
    replica = mesh.get_local_rank("replica")
    pipe = DistributedPipe(split(Net(), SCHEDULES[schedule]), schedule, chunks=CHUNKS, process_group=mesh["pipe"])
    optimizers, losses = WAYS[way](pipe, mesh.get_group("replica"), "SGD"), []
    for step in range(2):
        x, target = batch_of(step, replica)
        losses.append(pipe.step(x, target=target, loss_fn=mse).item())
        fail(pipe, x, target, mse)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    x, target = batch_of(2, replica)
    evaluated = pipe.eval().evaluate(x, target=target, loss_fn=mse).item()

    expected_losses, judged, weights = train_plainly()
    expected = recorded([0.0, 0.0], None, loss=expected_losses[replica], judged=[judged[replica]])
    assert_parity(expected, [recorded([0.0, 0.0], None, loss=losses, judged=[evaluated])])
    # Micro-batches in the order 0, 1, ...: the very sums of the plain loop; in another order, its rounding.
    states = by_rank(recorded([0.0], full_weights(pipe)))
    assert_parity(recorded([0.0], weights), states, rel=0.0 if schedule == "1f1b" else 1e-9, in_parts=True)


def words_loss(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, target)


@pytest.mark.composition("scale-pipe", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "ShardedDataParallel")
@pytest.mark.composition("scale-pipe", "DistributedDataParallel")
@pytest.mark.parametrize("way", TIED_WAYS)
@pytest.mark.ranks(4, in_turn=True)
def test_a_weight_of_two_stages_with_replicas_trains_as_one(way: str) -> None:
    """Norms and weights of three steps of two passes, where embedding and head are one weight in two stages."""
    mesh = mesh_of_two()
    stages = split(Net(words=WORDS, tied=True), ["blocks.2"])
    pipe = DistributedPipe(stages, "1f1b", chunks=CHUNKS, process_group=mesh["pipe"])
    optimizers, clipped_norms = TIED_WAYS[way](pipe, mesh.get_group("replica"), "AdamW"), []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for pairs in words_of(step, mesh.get_local_rank("replica")).chunk(2):
            pipe.step(pairs[:, 0], target=pairs[:, 1], loss_fn=words_loss)
            fail(pipe, pairs[:, 0], pairs[:, 1], words_loss)
        measures: Any = pipe
        if way == "oss":  # An optimizer of one stage measures all stages, too.
            (measures,) = optimizers
            assert measures.clip_grad_norm_(math.inf) == pipe.clip_grad_norm_(math.inf)
        clipped_norms.append(measures.clip_grad_norm_(MAX_NORM).item())
        for optimizer in optimizers:
            optimizer.step()
    of_ranks = by_rank(recorded([0.0] * 3, full_weights(pipe), norm=clipped_norms))

    model, norms = Net(words=WORDS, tied=True), []
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS["AdamW"])
    for step in range(3):
        optimizer.zero_grad()
        pairs = torch.cat([words_of(step, replica) for replica in range(2)])
        (2 * words_loss(model(pairs[:, 0]), pairs[:, 1])).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    assert min(norms) > MAX_NORM
    assert_parity(recorded([0.0] * 3, model.state_dict(), norm=norms), of_ranks, in_parts=True)
    # On every replica and every stage the same to the bit: so they stay one parameter.
    copies = [
        tensor
        for each in of_ranks
        for key, tensor in each.tensors.items()
        if key.name in ("embed.weight", "head.weight")
    ]
    assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies)


@pytest.mark.composition("scale-pipe", "ShardedGradScaler")
@pytest.mark.ranks(4, in_turn=True)
def test_all_ranks_of_a_pipeline_skip_a_step_together() -> None:
    """Whether steps were taken, where the gradients of one rank overflow in the first: all ranks skip it."""
    mesh = mesh_of_two()
    replica = mesh.get_local_rank("replica")
    pipe = DistributedPipe(split(Net(), ["blocks.2"]), chunks=CHUNKS, process_group=mesh["pipe"])
    (optimizer,) = with_fsdp(pipe, mesh.get_group("replica"))
    scaler = ShardedGradScaler(init_scale=8.0, process_group=group_of(), device="cpu")
    scaler.scale(torch.ones(()))  # Ranks without a loss know the scale, too.
    steps = []
    for step in range(2):
        before = [param.detach().clone() for param in pipe.parameters()]
        optimizer.zero_grad()
        x, target = batch_of(step, replica)
        factor = math.inf if step == 0 and replica == 0 else 1.0

        def loss_fn(output: Tensor, to: Tensor, factor: float = factor) -> Tensor:
            return scaler.scale(nn.functional.mse_loss(output, to)) * factor

        pipe.step(x, target=target, loss_fn=loss_fn)
        scaler.step(optimizer)
        scaler.update()
        steps.append(not all(map(torch.equal, before, pipe.parameters())))
    assert steps == [False, True]


def with_oss_and_ddp(pipe: DistributedPipe, replicas: dist.ProcessGroup) -> object:
    return (with_oss if 0 in pipe.stages else with_ddp)(pipe, replicas)


def with_stages_as_units(pipe: DistributedPipe, replicas: dist.ProcessGroup) -> None:
    for stage in pipe.stages.values():
        fully_shard(stage, replicas)


def with_flat_parameters(pipe: DistributedPipe, replicas: dist.ProcessGroup) -> None:
    for stage in pipe.stages.values():
        fully_shard(stage, replicas, options=ShardOptions(flatten_parameters=True))


# Of a wrapping what each replica says, the first and the second.
HIDDEN = "a wrapper around it hides it, or reduces its gradient in a way of its own. Use fully_shard"
AT_OTHER_TIMES = "is one parameter in stages 0 and 1, and their wrappers do not reduce its gradient at the same time"
DIFFERENT = "the ranks train different parameters"  # Their units say so first.
FAILURES: Mapping[str, tuple[Any, str, str]] = {
    "two ways": (with_oss_and_ddp, AT_OTHER_TIMES, AT_OTHER_TIMES),
    "hidden": (with_flat_parameters, HIDDEN, HIDDEN),
    "a replica fails": (with_oss, "replicas of this stage failed: ranks [1]", "no loss"),
    "frozen": (with_oss, "replicas of this stage failed", "frozen in [0] alone"),
    "frozen shard": (with_stages_as_units, DIFFERENT, DIFFERENT),
}


@pytest.mark.parametrize("name", FAILURES)
@pytest.mark.ranks(4, in_turn=True)
def test_unlike_replicas_of_a_tied_weight_are_refused(name: str) -> None:
    wrap, *words = FAILURES[name]
    mesh = mesh_of_two()
    replica = mesh.get_local_rank("replica")
    stages = split(Net(words=WORDS, tied=True), ["blocks.2"])
    pipe = DistributedPipe(stages, "1f1b", chunks=CHUNKS, process_group=mesh["pipe"])
    wrap(pipe, mesh.get_group("replica"))
    pairs = words_of(0, replica)
    if name == "frozen shard":  # Units compare what trains when they first run.
        pipe.step(pairs[:, 0], target=pairs[:, 1], loss_fn=words_loss)
    if "frozen" in name and replica == 1 and 0 in pipe.stages:  # Found once all backward passes have run.
        pipe.get_parameter("embed.weight").requires_grad_(False)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if name == "a replica fails" and replica == 1:
            raise OSError("no loss")
        return words_loss(output, target)

    with pytest.raises(StageError) as raised:
        pipe.step(pairs[:, 0], target=pairs[:, 1], loss_fn=loss_fn)
    assert words[replica] in (text := str(raised.value)), text


def group_left_out() -> list[str]:
    """Stages of equal shapes, which whoever is given no group takes for replicas of one."""
    pipe = DistributedPipe(nn.Sequential(*(nn.Linear(3, 3) for _ in range(2))), "gpipe", chunks=2)
    (stage,) = pipe.stages.values()
    before, told = [param.detach().clone() for param in pipe.parameters()], []
    alone = dist.new_subgroups(1)[0]
    for wrap in (
        lambda: OSS(pipe.parameters(), torch.optim.AdamW),
        lambda: fully_shard(stage),
        lambda: FullyShardedDataParallel(stage),
        lambda: DistributedDataParallel(stage),
        lambda: ShardedDataParallel(stage, OSS(stage.parameters(), torch.optim.SGD, lr=0.1)),
    ):
        with pytest.raises(
            ValueError, match=r'of a pipeline\'s stage.*\[0, 1\].*mesh\["data"\].get_group\(\)'
        ) as error:
            wrap()
        told.append(str(error.value).partition(":")[0])
    assert all(map(torch.equal, before, pipe.parameters()))
    # With the stage's own ranks, here one, each is right; and norms are those of all stages.
    pipe.stages[dist.get_rank()] = ShardedDataParallel(
        stage, OSS(stage.parameters(), torch.optim.SGD, process_group=alone, lr=0.1)
    )
    x = torch.arange(12.0).view(4, 3)
    pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
    norms = [nn.utils.clip_grad_norm_(pipe.parameters(), math.inf), pipe.clip_grad_norm_(math.inf)]
    assert norms[0] == norms[1] > 0
    nn.utils.clip_grad_norm_(pipe.parameters(), 0.5)
    assert pipe.clip_grad_norm_(math.inf).item() == pytest.approx(0.5, rel=1e-5)
    return told


def test_a_stage_with_the_group_left_out_is_refused() -> None:
    named = ["OSS", "fully_shard", "fully_shard", "DistributedDataParallel", "OSS"]
    assert run_ranks(group_left_out, 2) == [named, named]
