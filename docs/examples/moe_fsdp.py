"""A mixture of experts, sharded: scale-moe and scale-fsdp on two axes.

    torchrun --nproc-per-node 4 docs/examples/moe_fsdp.py

It prints the same losses on 1, 2, 4 and 8 ranks, up to rounding.
"""

import torch
import torch.distributed as dist
from torch import nn

from scale_core import ParallelDims, clip_grad_norm_
from scale_core.launch import init_distributed
from scale_fsdp import fully_shard
from scale_moe import Balance, MoE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch_of(step: int, rank: int = 0, size: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs [32 / size, 8] and targets [32 / size, 1] of a rank: its part of the step's batch."""
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(step))
    part = inputs.chunk(size)[rank].to(DEVICE)
    return part, part.sum(1, keepdim=True)


class Block(nn.Module):
    """A mixture of five experts, of which each token takes two, beside the residual stream."""

    def __init__(self, dims: ParallelDims) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        # `ep` divides the experts. The balance is that of the tokens of all ranks.
        self.moe = MoE(16, 32, num_experts=5, routing=2, balance=Balance(aux_loss_coef=0.01), process_group=dims)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns [tokens, 16] for [tokens, 16]."""
        y: torch.Tensor = x + self.moe(self.norm(x))
        return y


def main() -> list[float]:
    """Trains for ten steps and returns the losses of the whole batches."""
    group = init_distributed()
    dims = ParallelDims(ep=2 if group.size % 2 == 0 else 1)
    torch.manual_seed(0)
    blocks = [Block(dims) for _ in range(2)]
    model = nn.Sequential(nn.Linear(8, 16), *blocks, nn.Linear(16, 1)).to(DEVICE)
    for block in blocks:
        fully_shard(block.moe.experts, dims)  # over the ranks that hold the same experts
        fully_shard(block, dims)  # the router and the norm, over all ranks
    fully_shard(model, dims)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    losses = []
    for step in range(10):
        inputs, targets = batch_of(step, group.rank, group.size)  # every rank has tokens of its own
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0)  # each element once
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
