"""What one of 8 ranks holds and sends in a step of a GPT of 13 billion parameters: the real code on fake tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_core.simulate import Simulation, simulate
from scale_fsdp import MixedPrecision, fully_shard

GIB = 2**30
WORLD, LAYERS, WIDTH, HEADS, TOKENS, VOCABULARY, LOSS_CHUNKS = 8, 40, 5120, 40, 2048, 50_257, 8
PEAK_GIB = 26.2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).view(1, TOKENS, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(1, TOKENS, WIDTH))
        changed: Tensor = self.down(F.gelu(self.up(self.feed_norm(x))))
        return x + changed


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(tokens) + self.positions.weight
        return embedded


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        pieces = zip(x[0].chunk(LOSS_CHUNKS), targets[0].chunk(LOSS_CHUNKS), strict=True)
        return torch.stack([checkpoint(self.loss, *piece, use_reentrant=False) for piece in pieces]).sum()

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(self.norm(x)).float(), targets, reduction="sum") / TOKENS


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = Embed(), Head()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss: Tensor = self.head(x, tokens[:, 1:])
        return loss


def step(model: GPT, optimizer: torch.optim.Optimizer) -> None:
    model(torch.zeros(1, TOKENS + 1, dtype=torch.int64)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture(scope="module")
def second_step() -> Simulation:
    """The books of rank 0; only from the second step on does Adam's state stand there from the beginning."""
    with simulate(rank=0, world_size=WORLD) as simulation:
        model = GPT()
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        for unit in (model.embed, *model.blocks, model.head):
            fully_shard(unit, mixed_precision=policy)
        fully_shard(model, mixed_precision=policy)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        step(model, optimizer)
        simulation.restart()
        step(model, optimizer)
    return simulation


def test_13_billion_parameters_train_on_8_ranks_in_26_gib_each(second_step: Simulation) -> None:
    largest = "\n".join(map(str, second_step.largest_at_peak[:12]))
    assert second_step.peak_bytes <= PEAK_GIB * GIB, f"{second_step.report()}\n{largest}"


def test_every_parameter_is_sent_twice_and_every_gradient_once_in_half_precision(second_step: Simulation) -> None:
    rows = {"embed": 7, "block": 19, "head": 5}  # of padding, so that no row is cut between two ranks: 0.04 %
    embed = (VOCABULARY + TOKENS + rows["embed"]) * WIDTH
    block = 12 * WIDTH**2 + (13 + rows["block"]) * WIDTH
    head = (VOCABULARY + 2 + rows["head"]) * WIDTH
    bytes_per_number = 2
    sent = (embed + LAYERS * block + head) * bytes_per_number // WORLD * (WORLD - 1)
    assert second_step.bytes_sent == {"all_gather": 2 * sent, "reduce_scatter": sent}


def test_a_block_is_gathered_once_the_block_behind_it_needs_no_more_for_its_reduction(second_step: Simulation) -> None:
    ops = [collective.op for collective in second_step.collectives if collective.phase == "backward"]
    gather, reduce = "all_gather", "reduce_scatter"
    # The head checkpoints inside, so the last block is fetched at once; each other one after a recomputation.
    assert ops == [gather, gather, *[reduce, gather] * LAYERS, reduce, reduce]
