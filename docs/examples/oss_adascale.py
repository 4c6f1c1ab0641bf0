"""A large batch with the learning rate of a small one, on sharded gradients: scale-oss and scale-adascale.

    torchrun --nproc-per-node 2 docs/examples/oss_adascale.py

It prints the same gains on 1, 2 and 4 ranks, up to rounding; `python docs/examples/oss_adascale.py` runs it on one.
"""

import torch
import torch.distributed as dist
from torch import nn

from scale_adascale import AdaScale
from scale_core.launch import init_distributed
from scale_oss import OSS, ShardedDataParallel

SMALL_BATCHES = 4  # in each large one, on all ranks together

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [32 / size, 8] and targets [32 / size, 1] of a rank: its part of the step's batch."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    part = inputs.chunk(size)[rank].to(DEVICE)
    return part, part.sum(1, keepdim=True)


def main() -> list[float]:
    """Trains until the steps are worth ten of the small batch, and returns what each was worth."""
    group = init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(DEVICE)
    accumulate = SMALL_BATCHES // group.size
    oss = OSS(model.parameters(), torch.optim.SGD, lr=0.01)  # the learning rate of the small batch
    replicas = ShardedDataParallel(model, oss)
    optimizer = AdaScale(oss, num_gradients_to_accumulate=accumulate)  # measures gradients before they are sharded

    gains: list[float] = []
    while sum(gains) < 10:
        inputs, targets = batch_of(len(gains), group.rank, group.size)
        for some, wanted in zip(inputs.chunk(accumulate), targets.chunk(accumulate), strict=True):
            (nn.functional.mse_loss(replicas(some), wanted) / accumulate).backward()
        gains.append(optimizer.gain())
        optimizer.step()
        optimizer.zero_grad()
        if group.rank == 0:
            print(f"step {len(gains) - 1}: worth {gains[-1]:.3f} steps of the small batch")
    return gains


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
