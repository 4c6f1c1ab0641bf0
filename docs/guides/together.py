"""Trains one small model by several packages at once.

`torchrun --nproc-per-node 4 together.py`, or 1, 2 or 8.
It prints the same losses and gains on any number of ranks, up to rounding.
"""

import os

import torch
from torch import nn

from scale_adascale import AdaScale
from scale_checkpoint import checkpoint_modules
from scale_core import ParallelDims, clip_grad_norm_, group_of
from scale_fsdp import fully_shard
from scale_tp import parallelize

MICRO_BATCHES = 4  # of a step, on all ranks together


class Block(nn.Module):
    """A transformer's perceptron with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 60), nn.Linear(60, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [batch, 16] for [batch, 16]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> list[tuple[float, float]]:
    """Trains for five steps, and returns the loss and the gain of each."""
    world = int(os.environ["WORLD_SIZE"])
    tensor = 2 if world % 2 == 0 else 1
    # The ranks once, for all techniques: neighbors divide layers, and the others shard.
    dims = ParallelDims(tp=tensor)
    data = group_of(dims, "batch")

    torch.manual_seed(0)  # on all ranks: each keeps its part of the same weights
    model = nn.Sequential(
        nn.Linear(8, 16), *(Block() for _ in range(4)), nn.Linear(16, 1)
    )
    # 1. Layers are divided along the tensor axis,
    parallelize(
        model,
        {"*.norm": "replicate", "*.up": "colwise", "*.down": "rowwise"},
        dims,
    )
    # 2. blocks keep their inputs alone,
    checkpoint_modules(model, Block)
    # 3. and what is left of them is sharded along the data axis, block by block.
    for block in model[1:-1]:
        fully_shard(block, dims)
    fully_shard(model, dims)
    # 4. Any optimizer steps on the shards; AdaScale measures what its steps are worth.
    accumulate = MICRO_BATCHES * tensor // world
    optimizer = AdaScale(
        torch.optim.AdamW(model.parameters(), lr=0.005),
        num_gradients_to_accumulate=accumulate,
        process_group=dims,
    )

    seen = []
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        # The same on all ranks, each takes its part.
        batches = torch.randn(MICRO_BATCHES, 32, 8, generator=generator)
        total = torch.zeros(())
        for batch in batches[data.rank * accumulate :][:accumulate]:
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            (loss / accumulate).backward()
            total += loss.detach() / MICRO_BATCHES
        clip_grad_norm_(
            list(model.parameters()), 1.0
        )  # over both axes, each element once
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total, group=dims.process_group("batch"))
        seen.append((float(total), optimizer.gain()))
    if torch.distributed.get_rank() == 0:
        for step, (mean, gain) in enumerate(seen):
            print(f"step {step}: loss {mean:.4f}, gain {gain:.3f}")
    return seen


if __name__ == "__main__":
    main()
    torch.distributed.destroy_process_group()
