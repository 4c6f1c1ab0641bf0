"""Ranks that train on their own for four steps between two averages (DiLoCo), by scale-oss.

    torchrun --nproc-per-node 2 docs/examples/local_sgd.py

It is another algorithm than data parallel training: its losses depend on the number of ranks, as the paper has it.
`python docs/examples/local_sgd.py` runs it on one.
"""

import torch
import torch.distributed as dist
from torch import nn

from scale_core.launch import init_distributed
from scale_oss import LocalSGD

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [32 / size, 8] and targets [32 / size, 1] of a rank: its part of the step's batch."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    part = inputs.chunk(size)[rank].to(DEVICE)
    return part, part.sum(1, keepdim=True)


def main() -> list[float]:
    """Trains for 24 steps and returns the loss after each average, on data that no rank trains on."""
    group = init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)  # each rank's own
    # Counts the optimizer's steps; nothing else changes. The paper has sync_every=500 and outer_momentum=0.9.
    local_sgd = LocalSGD.diloco(model, optimizer, sync_every=4, outer_momentum=0.5)

    losses = []
    for step in range(24):
        inputs, targets = batch_of(step, group.rank, group.size)
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if local_sgd.steps_since_sync == 0:  # all ranks have the same weights now
            inputs, targets = batch_of(1000)
            with torch.no_grad():
                losses.append(float(nn.functional.mse_loss(model(inputs), targets)))
            if group.rank == 0:
                print(f"after {local_sgd.num_syncs} averages: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
