"""scale-checkpoint with data parallelism: inside and around DDP and sharded units, with no gather more than needed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.simulate import simulate
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard

pytest.importorskip("scale_checkpoint")
from scale_checkpoint import apply_checkpointing, checkpoint_wrapper  # where it is not installed there is nothing to do


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(7), nn.Linear(7, 13), nn.Linear(13, 7)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Linear(5, 7), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in (*self.blocks, self.blocks[0]):  # The first one twice.
            x = block(x)
        return x


def trained(model: nn.Module, rank: int) -> list[Tensor]:
    """Two steps; returns losses, and the local gradients."""
    found = []
    for step in range(2):
        torch.manual_seed(10 * step + rank)
        model.zero_grad()
        loss = model(torch.randn(4, 5)).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        with torch.no_grad():
            for param in model.parameters():
                if param.grad is not None:
                    param -= 0.1 * param.grad
    return found


def count_gathers(model: nn.Module) -> dict[str, int]:
    """How often each unit is gathered in a step, by its name."""
    from scale_fsdp.runtime.unit import units_in

    counts: dict[str, int] = {}
    for unit in units_in(model):
        for buffer in unit.buffers:
            plain = buffer.gather

            def gather(
                tag: Any, plain: Any = plain, buffer: Any = buffer, name: str = unit.name, **options: Any
            ) -> None:
                before = buffer.state
                plain(tag, **options)
                counts[name] = counts.get(name, 0) + (buffer.state is not before)

            buffer.gather = gather
    trained(model, 0)
    return {name: number // 2 for name, number in counts.items()}


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def in_every_order() -> dict[str, Any]:
    rank = torch.distributed.get_rank()
    found: dict[str, Any] = {}
    expected = trained(DistributedDataParallel(Net()), rank)
    for name, how in {"recompute": "recompute", "products": ["addmm"], "offload": "offload"}.items():
        model = Net()
        for block in model.blocks:
            apply_checkpointing(block, how, offload_inputs=True, min_bytes=0)
        found[f"ddp around, {name}"] = same(trained(DistributedDataParallel(model), rank), expected)

    pairs = [nn.Sequential(DistributedDataParallel(Block()), nn.Tanh()) for _ in range(2)]
    inside = [nn.Sequential(nn.Linear(5, 7), pair) for pair in pairs]
    inside[0].load_state_dict(inside[1].state_dict())
    checkpoint_wrapper(inside[0][1])
    found["ddp inside"] = same(*(trained(model, rank) for model in inside))

    def sharded(how: str) -> nn.Module:
        model = Net()
        for block in model.blocks:
            if how == "checkpoint, then shard":
                checkpoint_wrapper(block)
            if how == "offload, then shard":
                apply_checkpointing(block, "offload", min_bytes=0)
            if how == "products, then shard":
                checkpoint_wrapper(block, True, keep=["addmm"], min_bytes=0)
            fully_shard(block)
            if how == "shard, then checkpoint":
                checkpoint_wrapper(block)
        if how in ("pairs", "around several units"):
            model.blocks = nn.ModuleList([nn.Sequential(*model.blocks[:2]), model.blocks[2]])
        if how == "around several units":
            checkpoint_wrapper(model.blocks[0])
        return fully_shard(model)

    plain = sharded("plain")
    expected = trained(copy.deepcopy(plain), rank)
    hows = ["checkpoint, then shard", "shard, then checkpoint", "offload, then shard", "products, then shard"]
    models = {how: sharded(how) for how in hows}
    for how, model in models.items():
        found[how] = same(trained(copy.deepcopy(model), rank), expected)
    gathers = count_gathers(plain)
    found |= {f"gathers of {how}": count_gathers(model) == gathers for how, model in models.items()}
    found["around several units"] = same(
        trained(sharded("around several units"), rank), trained(sharded("pairs"), rank)
    )
    found["gathers are counted"] = torch.distributed.get_world_size() == 1 or gathers["blocks.1"] == 2
    return found


@pytest.mark.composition("scale-checkpoint", "scale-fsdp")
@pytest.mark.composition("scale-checkpoint", "DistributedDataParallel")
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_results_are_to_the_bit_and_nothing_is_gathered_twice(num_ranks: int) -> None:
    for found in run_ranks(in_every_order, num_ranks):
        assert [name for name, right in found.items() if not right] == []


@pytest.mark.simulation
@pytest.mark.parametrize("how", ["recompute", "offload", ["addmm"]])
def test_a_checkpointed_model_is_simulated(how: Any) -> None:
    """On tensors without values, whose random numbers and buffers nobody can look at."""
    kept = {}
    for treatment in ("keep", how):
        with simulate(rank=1, world_size=4) as simulation:
            model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU()) for _ in range(8)))
            for block in model:
                apply_checkpointing(block, treatment)
                fully_shard(block)
            fully_shard(model)
            before = simulation.current_bytes
            loss = model(torch.randn(1000, 64)).sum()
            kept[str(treatment)] = simulation.current_bytes - before
            loss.backward()
    if how != "offload":  # What is offloaded there is on the same host.
        assert kept[str(how)] < 0.7 * kept["keep"]
