"""scale-pipe with data parallelism across replicas of the pipeline, and with checkpointed parts of stages.

Four ranks are two pipelines of two ranks. Each replica of a stage is wrapped in one way or the other; whatever wraps
it, two steps equal plain PyTorch: each replica's gradients accumulated over its micro-batches, and their mean stepped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from scale_core import ShardedGradScaler
from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import FullyShardedDataParallel, full_state_dict, fully_shard
from scale_oss import OSS, ShardedDataParallel

pytest.importorskip("scale_pipe")
from scale_checkpoint import checkpoint_wrapper
from scale_pipe import DistributedPipe, StageError, split

CHUNKS = 4
TOLD = {
    "ways": "is one parameter in stages 0 and 1, and their wrappers do not reduce its gradient at the same time",
    "hidden": "a wrapper around it hides it, or reduces its gradient in a way of its own. Use fully_shard",
}
LR = 0.5
MAX_NORM = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Linear(3, 6), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Back(nn.Module):
    """What comes last in a model whose first and last weight are one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class TiedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head: nn.Module = Back(self.embed.weight)


def batch_of(step: int, replica: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + replica)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 2, generator=generator)


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


def with_flat_parameters(pipe: DistributedPipe, replicas: dist.ProcessGroup) -> None:
    for stage in pipe.stages.values():
        fully_shard(stage, replicas, flatten_parameters=True)


TIED_WAYS: Mapping[str, Wrap] = {
    "tied, ddp": with_ddp,
    "tied, fsdp": with_fsdp,
    "tied, units": with_tied_units,
    "tied, ddp and fsdp": with_ddp_and_fsdp,
    "tied, oss": with_oss,
}


def whole(pipe: DistributedPipe) -> dict[str, Tensor]:
    """This rank's parameters, whole, by the names of the model."""
    found: dict[str, Tensor] = {}
    for stage in pipe.stages.values():
        plain = stage.module if isinstance(stage, DistributedDataParallel | ShardedDataParallel) else stage
        assert isinstance(plain, nn.Module)
        found |= {name: tensor.clone() for name, tensor in full_state_dict(plain).items()}
    return found


def train_replicas() -> dict[str, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipe"))
    replicas, replica = mesh.get_group("replica"), mesh.get_local_rank("replica")
    results: dict[str, dict[str, Any]] = {}
    for schedule, cuts in (("1f1b", ["blocks.2"]), ("zb_v", ["blocks.1", "blocks.2", "blocks.3"])):
        for name, wrap in WAYS.items():
            pipe = DistributedPipe(split(Net(), cuts), schedule, chunks=CHUNKS, process_group=mesh["pipe"])
            optimizers = wrap(pipe, replicas, "SGD")
            losses = []
            for step in range(2):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                x, target = batch_of(step, replica)
                losses.append(pipe.step(x, target=target, loss_fn=nn.functional.mse_loss).item())
                fail(pipe, x, target)
                for optimizer in optimizers:
                    optimizer.step()
            x, target = batch_of(2, replica)
            judged = pipe.eval().evaluate(x, target=target, loss_fn=nn.functional.mse_loss).item()
            results[f"{name} {schedule}"] = {"losses": losses, "judged": judged, "parameters": whole(pipe)}
    results["scaler"] = {"steps": scaled(mesh, replicas, replica)}
    for name, wrap in TIED_WAYS.items():
        pipe = DistributedPipe(
            split(TiedNet().double(), ["blocks.2"]), "1f1b", chunks=CHUNKS, process_group=mesh["pipe"]
        )
        optimizers = wrap(pipe, replicas, "AdamW")
        norms = []
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for part in batch_of(step, replica)[0].double().chunk(2):
                pipe.step(part, target=part, loss_fn=nn.functional.mse_loss)
                fail(pipe, part, part)
            if wrap is with_oss:  # An optimizer of one stage measures all stages, too.
                (optimizer,) = optimizers
                assert optimizer.clip_grad_norm_(math.inf) == pipe.clip_grad_norm_(math.inf)
                norms.append(optimizer.clip_grad_norm_(MAX_NORM).item())
            else:
                norms.append(pipe.clip_grad_norm_(MAX_NORM).item())
            for optimizer in optimizers:
                optimizer.step()
        results[name] = {"norms": norms, "parameters": whole(pipe)}
    results["failures"] = failures(mesh, replicas, replica)
    return results


def fail(pipe: DistributedPipe, x: Tensor, target: Tensor) -> None:
    """A step that fails with the last micro-batch: whatever wraps the stages, what was accumulated stays as it is."""
    computed: list[Tensor] = []

    def loss_of(output: Tensor, to: Tensor) -> Tensor:
        computed.append(output)
        if len(computed) == CHUNKS:
            raise OSError("no loss")
        return nn.functional.mse_loss(output, to)

    with pytest.raises(StageError, match="no loss"):
        pipe.step(x, target=target, loss_fn=loss_of)


def scaled(mesh: Any, replicas: dist.ProcessGroup, replica: int) -> list[bool]:
    """Whether steps were taken, where the gradients of one rank overflow in the first: all ranks skip it."""
    pipe = DistributedPipe(split(Net(), ["blocks.2"]), chunks=CHUNKS, process_group=mesh["pipe"])
    (optimizer,) = with_fsdp(pipe, replicas)
    scaler = ShardedGradScaler(init_scale=8.0, process_group=group_of(), device="cpu")
    scaler.scale(torch.ones(()))  # Ranks without a loss know the scale, too.
    steps = []
    for step in range(2):
        before = [param.detach().clone() for param in pipe.parameters()]
        optimizer.zero_grad()
        x, target = batch_of(step, replica)
        factor = math.inf if step == 0 and replica == 0 else 1.0
        pipe.step(
            x,
            target=target,
            loss_fn=lambda output, to, factor=factor: scaler.scale(nn.functional.mse_loss(output, to)) * factor,
        )
        scaler.step(optimizer)
        scaler.update()
        steps.append(not all(map(torch.equal, before, pipe.parameters())))
    return steps


def failures(mesh: Any, replicas: dist.ProcessGroup, replica: int) -> dict[str, str]:
    """What is told where replicas of stages with a tied weight do not go together, by what was wrong."""
    told = {}

    def oss_and_ddp(pipe: DistributedPipe, group: dist.ProcessGroup) -> object:
        return (with_oss if 0 in pipe.stages else with_ddp)(pipe, group)

    ways = {"ways": oss_and_ddp, "hidden": with_flat_parameters, "replica": with_oss}
    ways |= {"frozen": with_oss, "frozen shard": with_fsdp}
    for name, wrap in ways.items():
        pipe = DistributedPipe(split(TiedNet(), ["blocks.2"]), "1f1b", chunks=CHUNKS, process_group=mesh["pipe"])
        wrap(pipe, replicas)
        x, _ = batch_of(0, replica)
        fails = name == "replica" and replica == 1
        if name == "frozen shard":  # Units compare what trains when they first run.
            pipe.step(x, target=x, loss_fn=nn.functional.mse_loss)
        if "frozen" in name and replica == 1 and 0 in pipe.stages:  # Found once all backward passes have run.
            pipe.get_parameter("embed.weight").requires_grad_(False)

        def loss_of(output: Tensor, target: Tensor, fails: bool = fails) -> Tensor:
            if fails:
                raise OSError("no loss")
            return nn.functional.mse_loss(output, target)

        with pytest.raises(StageError) as raised:
            pipe.step(x, target=x, loss_fn=loss_of)
        told[name] = str(raised.value)
    return told


def tied_steps() -> tuple[list[float], dict[str, Tensor]]:
    """The norms of three steps of plain PyTorch over the samples of both replicas, and the parameters after them."""
    model, norms = TiedNet().double(), []
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS["AdamW"])
    for step in range(3):
        optimizer.zero_grad()
        x = torch.cat([batch_of(step, replica)[0].double() for replica in range(2)])
        (2 * nn.functional.mse_loss(model(x), x)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM).item())
        optimizer.step()
    return norms, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def plain_steps() -> tuple[list[list[float]], dict[str, Tensor]]:
    """The losses of each replica, and the parameters after two steps of plain PyTorch."""
    model, losses = Net(), [[0.0, 0.0], [0.0, 0.0]]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(2):
        grads = []
        for replica in range(2):
            model.zero_grad()
            x, target = batch_of(step, replica)
            for part, to in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
                loss = nn.functional.mse_loss(model(part), to) / CHUNKS
                loss.backward()
                losses[replica][step] += loss.item()
            grads.append([param.grad for param in model.parameters()])
        for param, *both in zip(model.parameters(), *grads, strict=True):
            param.grad = (both[0] + both[1]) / 2
        optimizer.step()
    return losses, {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Ranks compute with one thread, and some kernels sum in another order with more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.composition("scale-pipe", "scale-fsdp")
@pytest.mark.composition("scale-pipe", "ShardedDataParallel")
@pytest.mark.composition("scale-pipe", "DistributedDataParallel")
@pytest.mark.composition("scale-checkpoint", "scale-pipe")
@pytest.mark.composition("scale-pipe", "ShardedGradScaler")
@pytest.mark.usefixtures("one_thread")
def test_stages_with_replicas_train_as_one_process() -> None:
    by_rank = run_ranks(train_replicas, 4)
    losses, parameters = plain_steps()
    norms, tied_parameters = tied_steps()
    model = Net()
    model.load_state_dict(parameters)
    with torch.no_grad():
        judged = [nn.functional.mse_loss(model(x), to).item() for x, to in (batch_of(2, replica) for replica in (0, 1))]
    for rank, results in enumerate(by_rank):
        told = results.pop("failures")
        assert ("no loss" if rank // 2 == 1 else "replicas of this stage failed: ranks [1]") in told["replica"]
        assert all(words in told[name] for name, words in TOLD.items()), told
        assert ("frozen in [0] alone" if rank // 2 == 1 else "replicas of this stage failed") in told["frozen"]
        assert "the ranks train different parameters" in told["frozen shard"], told  # Their units say so first.
    for way in TIED_WAYS:
        copies: list[Tensor] = []
        for results in by_rank:
            assert results[way]["norms"] == pytest.approx(norms, rel=1e-12) and min(norms) > MAX_NORM, way
            found = results.pop(way)["parameters"]
            for name, tensor in found.items():
                torch.testing.assert_close(tensor, tied_parameters[name], rtol=1e-12, atol=1e-12, msg=f"{way}: {name}")
            copies += [tensor for name, tensor in found.items() if name in ("embed.weight", "head.weight")]
        # On every replica and every stage the same to the bit: so they stay one parameter.
        assert len(copies) == 4 and all(torch.equal(copy, copies[0]) for copy in copies), way
    for way in by_rank[0]:
        if way == "scaler":
            assert [results[way]["steps"] for results in by_rank] == [[False, True]] * 4
            continue
        seen: set[str] = set()
        for rank, results in enumerate(by_rank):
            assert results[way]["losses"] == pytest.approx(losses[rank // 2], rel=1e-6), way
            assert results[way]["judged"] == pytest.approx(judged[rank // 2], rel=1e-5), way
            for name, tensor in results[way]["parameters"].items():
                # Micro-batches in the order 0, 1, ...: the very sums of the plain loop; in another order, its rounding.
                if "1f1b" in way:
                    assert torch.equal(tensor, parameters[name]), (way, name)
                torch.testing.assert_close(tensor, parameters[name], rtol=1e-5, atol=1e-7, msg=f"{way}: {name}")
                seen.add(name)
        assert seen == set(parameters), way


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


def test_a_stage_with_the_group_left_out_is_refused_by_all_that_would_take_others_for_replicas() -> None:
    named = ["OSS", "fully_shard", "fully_shard", "DistributedDataParallel", "OSS"]
    assert run_ranks(group_left_out, 2) == [named, named]
