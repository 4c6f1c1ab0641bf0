"""Layers divided between ranks, each with a part of the features, by scale-tp.

    torchrun --nproc-per-node 2 docs/examples/tensor_parallel.py

It prints the same losses on any number of ranks, up to rounding;
`python docs/examples/tensor_parallel.py` runs it on one.
"""

import torch
import torch.distributed as dist
from torch import nn

from scale_core import clip_grad_norm_
from scale_core.launch import init_distributed
from scale_tp import initialize_model_parallel, parallelize

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
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 63), nn.Linear(63, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [batch, 16] for [batch, 16]."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def main() -> list[float]:
    """Trains for ten steps and returns the losses of the batches."""
    group = init_distributed()
    initialize_model_parallel(group.size)
    torch.manual_seed(0)  # on all ranks: each keeps its part of the same weights
    model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 1)).to(DEVICE)
    # 63 hidden features do not divide by 2 or 4: one rank has fewer.
    parallelize(model, {"*.norm": "replicate", "*.up": "colwise", "*.down": "rowwise"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    losses = []
    for step in range(10):
        inputs, targets = batch_of(step)  # the same batch on all ranks
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0)  # counts each element once, wherever it is
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))  # the same on all ranks
        if group.rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
