"""A pipeline: each rank holds some of the layers, and micro-batches run through them, by scale-pipe.

    torchrun --nproc-per-node 2 docs/examples/pipe.py

It prints the same losses on 1 to 6 ranks, up to rounding; `python docs/examples/pipe.py` runs it on one.
"""

import torch
import torch.distributed as dist
from torch import nn

from scale_core.launch import init_distributed
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
    torch.manual_seed(0)  # every rank builds the same layers, and keeps its own
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]
    layers = nn.Sequential(nn.Linear(8, 32), *blocks, nn.Linear(32, 1))
    whole, rest = divmod(len(layers), group.size)
    balance = [whole + (rank < rest) for rank in range(group.size)]
    pipe = DistributedPipe(layers, "1f1b", balance=balance, chunks=4, device=DEVICE)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)

    losses = []
    for step in range(10):
        inputs, targets = batch_of(step)  # the first stage uses the inputs, the last one the targets
        loss = pipe.step(inputs, target=targets, loss_fn=nn.functional.mse_loss)  # forward and backward
        pipe.clip_grad_norm_(1.0)  # the norm over all stages
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))  # the same on all ranks
        if group.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
