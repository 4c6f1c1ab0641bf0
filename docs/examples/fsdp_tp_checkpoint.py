"""Divided layers, checkpointed and then sharded: scale-tp, scale-checkpoint and scale-fsdp on two axes.

    torchrun --nproc-per-node 4 docs/examples/fsdp_tp_checkpoint.py

It prints the same losses on 1, 2, 4 and 8 ranks, up to rounding.
"""

import torch
import torch.distributed as dist
from torch import nn

from scale_checkpoint import checkpoint_modules
from scale_core import ParallelDims, clip_grad_norm_, group_of
from scale_core.launch import init_distributed
from scale_fsdp import fully_shard
from scale_tp import parallelize

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [32 / size, 8] and targets [32 / size, 1] of a rank: its part of the step's batch."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    part = inputs.chunk(size)[rank].to(DEVICE)
    return part, part.sum(1, keepdim=True)


class Block(nn.Module):
    """A transformer's perceptron with a norm before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 60), nn.Linear(60, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [batch, 16] for [batch, 16]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> list[float]:
    """Trains for ten steps and returns the losses of the whole batches."""
    group = init_distributed()
    dims = ParallelDims(tp=2 if group.size % 2 == 0 else 1)
    data = group_of(dims, "batch")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), *(Block() for _ in range(3)), nn.Linear(16, 1)).to(DEVICE)
    parallelize(model, {"*.norm": "replicate", "*.up": "colwise", "*.down": "rowwise"}, dims)
    checkpoint_modules(model, Block)  # blocks keep their inputs alone
    for block in model[1:-1]:
        fully_shard(block, dims)  # this rank's part of the layers, sharded along the other axis
    fully_shard(model, dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    losses = []
    for step in range(10):
        inputs, targets = batch_of(step, data.rank, data.size)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0)  # over both axes, each element once
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / group.size
        if group.size > 1:
            dist.all_reduce(loss)  # only to print the loss of the whole batch
        losses.append(float(loss))
        if group.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
