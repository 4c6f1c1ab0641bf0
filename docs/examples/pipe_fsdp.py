"""A pipeline whose stages are sharded over its replicas: scale-pipe and scale-fsdp on two axes.

    torchrun --nproc-per-node 4 docs/examples/pipe_fsdp.py

It prints the same losses on 1, 2, 4 and 8 ranks, up to rounding.
"""

import torch
import torch.distributed as dist
from torch import nn

from scale_core import ParallelDims, group_of
from scale_core.launch import init_distributed
from scale_fsdp import fully_shard
from scale_pipe import DistributedPipe

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [32 / size, 8] and targets [32 / size, 1] of a rank: its part of the step's batch."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    part = inputs.chunk(size)[rank].to(DEVICE)
    return part, part.sum(1, keepdim=True)


def main() -> list[float]:
    """Trains for ten steps and returns the losses of the whole batches."""
    group = init_distributed()
    num_stages = 2 if group.size % 2 == 0 else 1
    dims = ParallelDims(pp=num_stages)
    data = group_of(dims, "batch")
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    layers = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))
    balance = [3, 3] if num_stages == 2 else [6]
    pipe = DistributedPipe(layers, "1f1b", balance=balance, chunks=2, process_group=dims, device=DEVICE)
    for stage in pipe.stages.values():
        fully_shard(stage, dims)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)

    losses = []
    for step in range(10):
        inputs, targets = batch_of(step, data.rank, data.size)  # each pipeline its part
        loss = pipe.step(inputs, target=targets, loss_fn=nn.functional.mse_loss)
        pipe.clip_grad_norm_(1.0)  # over both axes
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
