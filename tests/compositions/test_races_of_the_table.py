"""Every combination that the guide which-technique.md calls ready has no race, in three steps on simulated streams.

The cases are the rows of the table, so that a new row is tried, too; those of three techniques are in `soak`. Each axis
of the mesh has two ranks. What else can be set of a combination stands in `test_races_of_compositions.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from composition_table import BETWEEN, PAGE, ready_rows
from simulated_pipe import simulate_peers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.utils.checkpoint import checkpoint

import scale_tp
from scale_adascale import AdaScale
from scale_check.simulate import Simulation, simulate
from scale_checkpoint import checkpoint_wrapper
from scale_core import ShardedGradScaler
from scale_core.comm.group import Group
from scale_fsdp import fully_shard
from scale_moe import MoE, average_replicated_gradients
from scale_oss import OSS, LocalSGD, ShardedDataParallel
from scale_pipe import DistributedPipe

pytestmark = [
    pytest.mark.simulation,
    # AdaScale asks where a gradient stands; in a simulation it stands nowhere.
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

ROWS = ready_rows(PAGE.read_text(encoding="utf-8"))
AXES = {"scale-pipe": "pipe", "LocalSGD": "replica", "scale-moe": "expert", "scale-tp": "tensor"}
DATA_PARALLEL = ("scale-fsdp", "OSS", "ShardedDataParallel", "DistributedDataParallel")
SAMPLES, LENGTH, WIDTH, CHUNKS, STEPS = 4, 8, 32, 2, 3


def without_attention(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
    """What takes the place of attention where it stays on one rank, whose forty operators are on one stream."""
    return query + key + value


class Block(nn.Module):
    """Attention, and a feed-forward layer or experts."""

    def __init__(self, experts: Callable[[], nn.Module] | None, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.moe = None if experts is None else experts()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(query, key, value, is_causal=True).transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return x if self.moe is None else x + self.moe(x)


class Checkpointed(nn.Module):
    """A block that torch recomputes."""

    def __init__(self, block: Block, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.block, x, use_reentrant=self.use_reentrant)
        return result


@dataclass
class Training:
    """A row of the table as a training: the techniques, and the axes of its mesh."""

    techniques: frozenset[str]
    mesh: DeviceMesh
    simulation: Simulation

    def __contains__(self, technique: str) -> bool:
        return technique in self.techniques

    def group(self, *axes: str) -> Any:
        """The ranks along these axes that have this rank's place on all others; those the mesh does not have are 1."""
        names = [name for name in self.mesh.mesh_dim_names or () if name in axes]
        if len(names) < 2:
            return self.mesh[names[0]].get_group() if names else Group()
        coordinate = self.mesh.get_coordinate() or []
        place = tuple(
            slice(None) if name in names else at
            for name, at in zip(self.mesh.mesh_dim_names or (), coordinate, strict=True)
        )
        with self.simulation.aside():
            return dist.new_group(self.mesh.mesh[place].flatten().tolist())

    def experts(self) -> nn.Module:
        axis: Any = self.group("context" if "context parallel" in self else "expert")
        if "scale-tp" in self:
            axis = self.mesh["expert", "tensor"]
        return MoE(WIDTH, 2 * WIDTH, 4, process_group=axis, batch_process_group=Group())

    def stage(self) -> nn.Sequential:
        """Two blocks, on the simulated device, divided and recomputed."""
        attend: Callable[..., Tensor] = without_attention
        if "context parallel" in self:
            attend = partial(scale_tp.ring_attention, process_group=self.group("context"))
        with torch.device("sim"):
            blocks = nn.Sequential(*(Block(self.experts if "scale-moe" in self else None, attend) for _ in range(2)))
        if "scale-tp" in self:
            plan: Any = {"*.up": "colwise", "*.down": "rowwise"}
            scale_tp.parallelize(blocks, plan, self.mesh["tensor"], sync_module_states=False)
        if "scale-checkpoint" in self:
            for block in blocks:
                checkpoint_wrapper(block, offload_to_cpu=True, min_bytes=0)
        if "torch.utils.checkpoint" in self:
            blocks = nn.Sequential(*(Checkpointed(block, bool(index)) for index, block in enumerate(blocks)))
        return blocks

    def optimizer(self, params: Iterable[Tensor]) -> Any:
        kind = SGD if self.techniques & {"scale-adascale", "LocalSGD"} else AdamW
        if self.techniques & {"OSS", "ShardedDataParallel"}:
            over = self.group("data", "expert", "context") if "scale-fsdp" in self else self.group("data")
            return OSS(params, optim=kind, lr=1e-3, process_group=over)
        return kind(params, lr=1e-3, foreach=True)

    def wrap(self, stage: nn.Sequential, optimizer: Any) -> nn.Module:
        data = self.group("data")
        if "ShardedDataParallel" in self:
            return ShardedDataParallel(stage, optimizer, process_group=data)
        if self.techniques & {"OSS", "DistributedDataParallel"} and "scale-fsdp" not in self:
            return DistributedDataParallel(stage, process_group=data, init_sync=False)
        return stage

    def shard(self, stage: nn.Sequential) -> nn.Sequential:
        everything = self.group("data", "expert", "context")
        for block in stage:
            for module in block.modules():
                if isinstance(module, MoE):
                    fully_shard(module.experts, self.group("data"))
            fully_shard(block, everything)
        fully_shard(stage, everything)
        return stage

    def adascale(self, optimizer: Any) -> Any:
        if "LocalSGD" in self:
            return AdaScale(optimizer, num_gradients_to_accumulate=CHUNKS, process_group=Group())
        options: dict[str, Any] = {"process_group": self.group("data", "expert")}
        if self.techniques & {"scale-pipe", "scale-tp"}:
            options["model_parallel_group"] = self.group("pipe", "tensor")
        return AdaScale(optimizer, num_gradients_to_accumulate=CHUNKS, **options)

    def run(self) -> None:
        """Three steps of two micro-batches."""
        pipe = None
        model: Any = self.stage()
        if "scale-pipe" in self:
            stages = [model, self.stage()]
            pipe = model = DistributedPipe(stages, chunks=CHUNKS, process_group=self.group("pipe"), device="sim")
        parts = [model] if pipe is None else list(pipe.stages.values())
        if "scale-fsdp" in self:
            parts = [self.shard(part) for part in parts]
        optimizer = self.optimizer(model.parameters())
        parts = [self.wrap(part, optimizer) for part in parts]
        if pipe is None:
            (model,) = parts
        else:
            for index, part in zip(list(pipe.stages), parts, strict=True):
                pipe.stages[index] = part
        if "scale-moe" in self and "scale-fsdp" not in self:
            average_replicated_gradients(model, self.group("context" if "context parallel" in self else "expert"))
        averaging = None
        stepped = self.adascale(optimizer) if "scale-adascale" in self else optimizer
        if "LocalSGD" in self:
            averaging = LocalSGD(model, optimizer, sync_every=2, process_group=self.group("replica"))
        scaler = ShardedGradScaler("sim", process_group=self.group("pipe")) if "ShardedGradScaler" in self else None

        def loss_fn(output: Tensor, target: Tensor) -> Tensor:
            loss = F.mse_loss(output, target)
            return loss if scaler is None else scaler.scale(loss)

        for _ in range(STEPS):
            x, target = (torch.randn(SAMPLES, LENGTH, WIDTH, device="sim") for _ in range(2))
            if pipe is not None:
                pipe.step(x, target=target, loss_fn=loss_fn)
            else:
                for part, to in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True):
                    loss_fn(model(part.requires_grad_()), to).backward()
            if scaler is None:
                stepped.step()
            else:
                scaler.step(stepped)
                scaler.update()
            stepped.zero_grad()
        if averaging is not None:
            averaging.sync()


def axes_of(techniques: frozenset[str]) -> list[str]:
    axes = [axis for technique, axis in AXES.items() if technique in techniques]
    if "context parallel" in techniques:
        axes = [*[axis for axis in axes if axis != "expert"], "context"]
    if techniques & set(DATA_PARALLEL) or not axes:
        axes.append("data")
    return axes


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=BETWEEN.join(sorted(row)), marks=[pytest.mark.soak] if len(row) == 3 else [])
        for row in ROWS
    ],
)
def test_three_steps_of_a_row_have_no_race(row: frozenset[str], monkeypatch: pytest.MonkeyPatch) -> None:
    axes = axes_of(row)
    has_stages = "scale-pipe" in row
    if has_stages:
        simulate_peers(monkeypatch, 2, (SAMPLES, LENGTH, WIDTH), CHUNKS)
    world_size = 2 ** len(axes)
    for rank in (0, world_size // 2) if has_stages else (0,):  # One rank of each stage.
        with simulate(rank=rank, world_size=world_size, device="sim", races=True) as simulation:
            with simulation.aside():
                mesh = init_device_mesh("cpu", (2,) * len(axes), mesh_dim_names=tuple(axes))
            Training(row, mesh, simulation).run()
