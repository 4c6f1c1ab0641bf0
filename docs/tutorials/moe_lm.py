"""A mixture of experts learns to write Python; ranks divide the experts.

    torchrun --nproc-per-node 2 docs/tutorials/moe_lm.py
    torchrun --nproc-per-node 2 docs/tutorials/moe_lm.py --experts 1

Each block has several experts in place of one perceptron, and each token goes to two
of them. The second command trains the dense model with the same work per token, to
compare the held-out losses. The text is the source code of Python's standard library.
"""

import argparse
import math
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scale_core import Group, clip_grad_norm_, group_of
from scale_core.comm.collectives import all_reduce
from scale_core.launch import init_distributed
from scale_core.sharded_tensor.tensor import local_tensor
from scale_fsdp import fully_shard
from scale_moe import Balance, MoE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, CONTEXT, WIDTH, HIDDEN, HEADS, LAYERS = 32, 48, 64, 128, 4, 2


class Dense(nn.Module):
    """Two experts' worth of perceptron, for all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 2 * HIDDEN), nn.Linear(WIDTH, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, context, width] for the same shape."""
        y: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return y


class Block(nn.Module):
    """Attention and a mixture of experts, each on the residual stream."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.feed_forward: nn.Module = Dense()
        if num_experts > 1:
            # All ranks divide the experts. The load balancing loss keeps them busy.
            balance = Balance(aux_loss_coef=0.01)
            self.feed_forward = MoE(WIDTH, HIDDEN, num_experts, 2, balance=balance)

    def forward(self, x: Tensor) -> Tensor:
        """Returns [batch, context, width] for the same shape."""
        batch, context, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, context, 3, HEADS, WIDTH // HEADS)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, context, WIDTH))
        y: Tensor = x + self.feed_forward(self.norm_2(x))
        return y


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.token, self.position = (
            nn.Embedding(256, WIDTH),
            nn.Embedding(CONTEXT, WIDTH),
        )
        self.blocks = nn.ModuleList(Block(num_experts) for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns logits [batch, context, 256] for tokens [batch, context]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def read_text(num_bytes: int = 1_000_000) -> tuple[Tensor, Tensor]:
    """Returns the bytes to learn from and the bytes to test on, as int64."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)[:num_bytes]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def loss_of(model: nn.Module, data: Tensor, seed: int) -> Tensor:
    """Returns the cross entropy of this rank's part of a batch."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=generator)
    group = group_of()
    rows = starts.chunk(group.size)[group.rank][:, None] + torch.arange(CONTEXT + 1)
    tokens = data[rows].to(DEVICE)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def sum_over_ranks(value: Tensor) -> Tensor:
    """Returns the sum over all ranks; all ranks call it."""
    return all_reduce(value.detach().clone(), group_of()).wait()


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Trains; returns losses, the held-out loss last, and the shares of the experts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args(arguments)
    group = init_distributed()
    training, held_out = read_text()

    torch.manual_seed(0)
    model = Model(options.experts).to(DEVICE)
    for block in model.blocks:
        if isinstance(block.feed_forward, MoE):
            # Each expert is on one rank alone, so there is nothing to shard it over.
            fully_shard(block.feed_forward.experts, Group())
        fully_shard(block)  # attention, norms and router, over all ranks
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if group.rank == 0:
        shard = sum(local_tensor(param).numel() for param in model.parameters())
        print(f"{options.experts} experts; rank 0 keeps {shard:,} elements")

    losses = []
    for step in range(options.steps):
        loss = loss_of(model, training, seed=step)
        loss.backward()
        clip_grad_norm_(list(model.parameters()), 1.0)  # each element once
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum_over_ranks(loss)) / group.size)
        if group.rank == 0 and (step % 20 == 0 or step == options.steps - 1):
            print(f"step {step}: loss {losses[-1]:.3f}")

    shares: list[float] = []
    with torch.no_grad():
        test = torch.stack([loss_of(model, held_out, -1 - each) for each in range(4)])
    losses.append(float(sum_over_ranks(test.mean())) / group.size)
    last = model.blocks[-1].feed_forward
    if isinstance(last, MoE) and last.tokens_per_expert is not None:
        tokens = sum_over_ranks(last.tokens_per_expert).float()
        shares = (tokens / tokens.sum()).tolist()
    if group.rank == 0:
        print(f"held-out: {losses[-1] / math.log(2):.2f} bits per byte (untrained: 8)")
        if shares:
            print("tokens per expert:", " ".join(f"{share:.0%}" for share in shares))
    return {"losses": losses, "shares": shares}


if __name__ == "__main__":
    main(sys.argv[1:])
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
