"""A GPT as wide as one of 13 billion parameters on tensors without memory, and what a step of it holds and sends."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_check.simulate import Simulation
from scale_check.simulate.traffic import Collective
from scale_fsdp import MixedPrecisionPolicy, fully_shard

GIB = 2**30
WIDTH, HEADS, TOKENS, VOCABULARY = 5120, 40, 2048, 50_257
LAYERS = 40  # of one with 13 billion parameters; fewer show the same in less time


class Block(nn.Module):
    """A pre-norm transformer block, [B, T, d] -> [B, T, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(x.shape))
        changed: Tensor = self.down(F.gelu(self.up(self.feed_norm(x))))
        return x + changed


class Embed(nn.Module):
    """Token and position embeddings, [B, T] -> [B, T, d]."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions.weight
        return embedded


class Head(nn.Module):
    """The mean cross entropy, of some tokens at a time, so that the logits of all of them never stand together."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor, chunks: int) -> Tensor:
        pieces = zip(x.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
        losses = [checkpoint(self.loss, *piece, use_reentrant=False) for piece in pieces]
        return torch.stack(losses).sum() / targets.numel()

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.norm(x)).float(), targets, reduction="sum")


class GPT(nn.Module):
    """Its blocks keep nothing but their input for the backward; it returns the loss."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.embed, self.head = Embed(), Head()
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))

    def forward(self, tokens: Tensor, chunks: int) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss: Tensor = self.head(x, tokens[:, 1:], chunks)
        return loss


def sharded_gpt(num_layers: int, **options: Any) -> GPT:
    """Each block is a unit, and so are the embeddings and the head; all in bf16 over fp32 shards."""
    model = GPT(num_layers)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    for unit in (model.embed, *model.blocks, model.head, model):
        fully_shard(unit, mp_policy=policy, **options)
    return model


class Books(NamedTuple):
    """What one rank has held and sent in a step."""

    peak_bytes: int
    host_peak_bytes: int
    bytes_sent: dict[str, int]
    collectives: list[Collective]
    told: str


def train(model: GPT, optimizer: torch.optim.Optimizer, simulation: Simulation, batch: int, chunks: int) -> Books:
    """Takes one step, and returns the books of it."""
    simulation.restart()
    tokens = torch.zeros(batch, TOKENS + 1, dtype=torch.int64, device=simulation.device)
    model(tokens, chunks).backward()
    optimizer.step()
    optimizer.zero_grad()
    host = simulation.on("cpu")
    largest = "\n".join(map(str, [*simulation.largest_at_peak[:12], *host.largest_at_peak[:12]]))
    return Books(
        simulation.peak_bytes,
        host.peak_bytes,
        simulation.bytes_sent,
        list(simulation.collectives),
        f"{simulation.report()}\n{largest}",
    )


def adamw(model: GPT) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), foreach=False)
