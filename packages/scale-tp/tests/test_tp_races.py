"""No layer that ranks divide has a race: three steps of each on simulated streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from with_options import with_options

import scale_tp
from scale_check.simulate import simulate
from scale_core.comm.group import group_of
from scale_tp import LayerOptions, megatron
from scale_tp.async_tp.all_reduce_matmul import linear_all_reduce, linear_with_grad_all_reduce
from scale_tp.async_tp.collective_matmul import gather_linear, linear_scatter
from scale_tp.layers.linear_ops import all_reduce_copies

pytestmark = [
    pytest.mark.simulation,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-in takes the place of no real accelerator"),
]

WIDTH, WORDS, STEPS = 32, 64, 3


@pytest.fixture(autouse=True)
def _simulation() -> Iterator[None]:
    with simulate(world_size=4, device="sim", races=True):
        yield


def train(model: nn.Module, loss_of: Callable[[], Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(STEPS):
        loss_of().backward()
        optimizer.step()
        optimizer.zero_grad()


class Block(nn.Module):
    def __init__(self, overlap_pieces: int | None) -> None:
        super().__init__()
        options: Any = {"process_group": group_of(), "sequence_parallel": True, "overlap_pieces": overlap_pieces}
        self.norm = scale_tp.ParallelLayerNorm(WIDTH, process_group=group_of())
        self.up = scale_tp.ColumnParallelLinear(
            WIDTH, 4 * WIDTH, **with_options(LayerOptions, gather_output=False, **options)
        )
        self.down = scale_tp.RowParallelLinear(
            4 * WIDTH, WIDTH, **with_options(LayerOptions, input_is_parallel=True, **options)
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return result


@pytest.mark.parametrize("overlap_pieces", [None, 1, 2])
def test_blocks_with_a_divided_sequence_have_no_race(overlap_pieces: int | None) -> None:
    with torch.device("sim"):
        model = nn.Sequential(Block(overlap_pieces), Block(overlap_pieces))

    def loss() -> Tensor:
        x = torch.randn(8, 2, WIDTH, device="sim", requires_grad=True)
        return model(megatron.scatter_to_sequence_parallel_region(x, group_of())).sum()

    train(model, loss)


def test_a_divided_model_has_no_race() -> None:
    with torch.device("sim"):
        model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    scale_tp.parallelize(model, {"0": "colwise", "2": "rowwise"}, group_of(), sync_module_states=False)
    train(model, lambda: model(torch.randn(8, WIDTH, device="sim")).sum())


@pytest.mark.parametrize("pieces", [1, 3])
def test_products_beside_their_messages_have_no_race(pieces: int) -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, device="sim"))
    holder = nn.ParameterList([weight])

    def loss() -> Tensor:
        part = torch.randn(6, 2, WIDTH, device="sim", requires_grad=True)
        (full,) = gather_linear(part, [weight], group_of(), pieces=pieces)
        return linear_scatter(full, weight, group_of(), pieces=pieces).sum()

    train(holder, loss)


@pytest.mark.parametrize("pieces", [1, 3])
def test_products_beside_their_sums_have_no_race(pieces: int) -> None:
    weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH, device="sim")) for _ in range(2)])

    def loss() -> Tensor:
        x = torch.randn(6, WIDTH, device="sim", requires_grad=True)
        _, hidden = linear_with_grad_all_reduce(x.mul(2), weights[0], None, group_of())
        return linear_all_reduce(hidden, weights[1], group_of(), pieces).sum()

    train(weights, loss)


def test_gradients_of_copied_heads_have_no_race() -> None:
    for _ in range(STEPS):
        gradient = torch.randn(WIDTH, device="sim")
        all_reduce_copies(gradient, group_of(), [0, 1]).add_(1)
        gradient.zero_()


def test_words_that_ranks_divide_have_no_race() -> None:
    with torch.device("sim"):
        embedding = scale_tp.VocabParallelEmbedding(WORDS, WIDTH, process_group=group_of())
        head = scale_tp.ColumnParallelLinear(WIDTH, WORDS, bias=False, gather_output=False, process_group=group_of())

    def loss() -> Tensor:
        words = torch.zeros(2, 8, dtype=torch.int64, device="sim")
        return scale_tp.vocab_parallel_cross_entropy(head(embedding(words)), words, process_group=group_of()).mean()

    train(nn.ModuleList([embedding, head]), loss)


@pytest.mark.parametrize("attend", [scale_tp.ring_attention, scale_tp.ulysses_attention])
@pytest.mark.parametrize("is_causal", [False, True])
def test_attention_over_a_divided_sequence_has_no_race(attend: Callable[..., Tensor], is_causal: bool) -> None:
    with torch.device("sim"):
        qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def loss() -> Tensor:
        query, key, value = qkv(torch.randn(2, 8, WIDTH, device="sim")).view(2, 8, 3, 4, -1).permute(2, 0, 3, 1, 4)
        return attend(query, key, value, group_of(), is_causal=is_causal).sum()

    train(qkv, loss)
