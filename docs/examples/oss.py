"""Optimizer state sharded over all ranks (ZeRO-1) beside DistributedDataParallel, by scale-oss.

    torchrun --nproc-per-node 2 docs/examples/oss.py

It prints the same losses on any number of ranks, up to rounding; `python docs/examples/oss.py` runs it on one.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.launch import init_distributed
from scale_oss import OSS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [32 / size, 8] and targets [32 / size, 1] of a rank: its part of the step's batch."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    part = inputs.chunk(size)[rank].to(DEVICE)
    return part, part.sum(1, keepdim=True)


def main() -> list[float]:
    """Trains for ten steps and returns the losses of the whole batches."""
    group = init_distributed()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(
        DEVICE
    )
    optimizer = OSS(model.parameters(), torch.optim.AdamW, lr=0.01)  # each rank updates its part, and keeps its state
    if group.size > 1:
        model = DistributedDataParallel(model)

    losses = []
    for step in range(10):
        inputs, targets = batch_of(step, group.rank, group.size)
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()  # and sends the updated parameters to all ranks
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
