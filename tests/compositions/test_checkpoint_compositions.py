"""scale-checkpoint with data parallelism: inside and around DDP and sharded units, with no gather more than needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_check.simulate import simulate
from scale_checkpoint import apply_checkpointing, checkpoint_wrapper
from scale_fsdp import fully_shard


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


def assert_same_training(model: nn.Module, expected: nn.Module) -> None:
    rank = torch.distributed.get_rank()
    ours, theirs = trained(model, rank), trained(expected, rank)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


@pytest.mark.composition("scale-checkpoint", "DistributedDataParallel")
@pytest.mark.parametrize("how", ["recompute", "offload", ["addmm"]])
@pytest.mark.ranks(1, 2, in_turn=True)
def test_checkpoints_inside_of_ddp_change_no_bit(how: Any) -> None:
    model = Net()
    for block in model.blocks:
        apply_checkpointing(block, how, offload_inputs=True, min_bytes=0)
    assert_same_training(DistributedDataParallel(model), DistributedDataParallel(Net()))


@pytest.mark.composition("scale-checkpoint", "DistributedDataParallel")
@pytest.mark.ranks(1, 2, in_turn=True)
def test_a_checkpoint_around_ddp_changes_no_bit() -> None:
    pairs = [nn.Sequential(DistributedDataParallel(Block()), nn.Tanh()) for _ in range(2)]
    model, expected = (nn.Sequential(nn.Linear(5, 7), pair) for pair in pairs)
    model.load_state_dict(expected.state_dict())
    checkpoint_wrapper(model[1])
    assert_same_training(model, expected)


def sharded(how: str = "") -> nn.Module:
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
    if "units" in how:
        model.blocks = nn.ModuleList([nn.Sequential(*model.blocks[:2]), model.blocks[2]])
    if how == "around units":
        checkpoint_wrapper(model.blocks[0])
    return fully_shard(model)


@pytest.mark.composition("scale-checkpoint", "scale-fsdp")
@pytest.mark.parametrize(
    "how",
    ["checkpoint, then shard", "shard, then checkpoint", "offload, then shard", "products, then shard"],
)
@pytest.mark.ranks(1, 2, in_turn=True)
def test_checkpoints_of_units_change_no_bit_and_gather_no_more(how: str) -> None:
    assert_same_training(sharded(how), sharded())
    gathers = count_gathers(sharded())
    assert count_gathers(sharded(how)) == gathers
    assert torch.distributed.get_world_size() == 1 or gathers["blocks.1"] == 2


@pytest.mark.composition("scale-checkpoint", "scale-fsdp")
@pytest.mark.ranks(1, 2, in_turn=True)
def test_a_checkpoint_around_several_units_changes_no_bit() -> None:
    assert_same_training(sharded("around units"), sharded("units in pairs"))


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
