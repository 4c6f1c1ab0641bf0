"""What the guide promises of a block: two sums in each direction, or their halves, at any number of ranks.

Counted is what a block adds to a model: that of two blocks, less that of one.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallelize_cases import gpt2, llama
from torch import Tensor, nn
from with_options import with_options

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import exchange
from scale_core.comm.group import group_of
from scale_tp import (
    GPT2_PLAN,
    ColumnParallelLinear,
    LayerOptions,
    ParallelAttention,
    ParallelLayerNorm,
    RowParallelLinear,
    parallelize,
)
from scale_tp import comm as moves

COUNTED = {
    "sum": moves.all_reduce_sum,
    "gather": moves.all_gather_along,
    "sum of parts": moves.reduce_scatter_along,
    "copies": all_to_all,  # Nothing else of what is here sends to chosen ranks.
    "question": exchange,
}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts them wherever scale-tp calls them."""
    counts: Counter[str] = Counter()
    replaced: list[tuple[Any, str, Any]] = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "scale_tp":
            continue
        for attribute, value in list(vars(module).items()):
            for kind, act in COUNTED.items():
                if value is act:
                    replaced.append((module, attribute, value))
                    setattr(module, attribute, _counting(counts, kind, act))
    try:
        yield counts
    finally:
        for module, attribute, value in replaced:
            setattr(module, attribute, value)


def _counting(counts: Counter[str], kind: str, act: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[kind] += 1
        return act(*args, **kwargs)

    return call


class Block(nn.Module):
    """A block of scale-tp's own layers; of four heads, two or four share one of the key-value heads."""

    def __init__(self, key_value_heads: int, bias: bool, sequence_parallel: bool) -> None:
        super().__init__()
        options: Any = {"process_group": group_of(), "sequence_parallel": sequence_parallel}
        norm: Any = (
            (lambda: ParallelLayerNorm(8, process_group=group_of())) if sequence_parallel else lambda: nn.LayerNorm(8)
        )
        self.norms = nn.ModuleList([norm(), norm()])
        self.attention = ParallelAttention(8, 4, key_value_heads, **with_options(LayerOptions, bias=bias, **options))
        self.up = ColumnParallelLinear(8, 11, bias, **with_options(LayerOptions, gather_output=False, **options))
        self.down = RowParallelLinear(11, 8, bias, **with_options(LayerOptions, input_is_parallel=True, **options))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.down(torch.tanh(self.up(self.norms[1](x))))


def counts_of(model: nn.Module, data: Tensor) -> tuple[Counter[str], Counter[str]]:
    """Those of a forward and of a backward, the second time: at first ranks ask each other what fits."""
    for _ in range(2):
        with counted() as forward:
            output = model(data)
        loss = getattr(output, "logits", output).square().mean()
        with counted() as backward:
            loss.backward()
    return forward, backward


def per_block(build: Callable[[int], nn.Module], data: Tensor) -> tuple[dict[str, int], dict[str, int]]:
    one, two = (counts_of(build(num_blocks), data) for num_blocks in (1, 2))
    return dict(two[0] - one[0]), dict(two[1] - one[1])


PLAIN = {"sum": 2}, {"sum": 2}


def halves(num_sums: int) -> tuple[dict[str, int], dict[str, int]]:
    """Between blocks on a part of the sequence; the sums in the backward pass are small, of norms' and biases'."""
    both = {"gather": 2, "sum of parts": 2}
    return both, both | {"sum": num_sums}


@pytest.mark.ranks(2, 4)
def test_a_block_of_our_layers_takes_two_sums_each_way() -> None:
    group = group_of()
    for key_value_heads, bias in ((4, False), (4, True), (1, True)):
        # Copies of keys and values: for each of them the weight's and the bias's gradients.
        copies = {"copies": 4} if key_value_heads == 1 else {}

        def blocks(number: int, key_value_heads: int = key_value_heads, bias: bool = bias) -> nn.Module:
            return nn.Sequential(*(Block(key_value_heads, bias, False) for _ in range(number)))

        forward, backward = per_block(blocks, torch.randn(2, 5, 8).requires_grad_())
        assert (forward, backward) == (PLAIN[0], PLAIN[1] | copies), (key_value_heads, bias)

        def parts(number: int, key_value_heads: int = key_value_heads, bias: bool = bias) -> nn.Module:
            return nn.Sequential(*(Block(key_value_heads, bias, True) for _ in range(number)))

        length = 1 + (group.rank == 0)  # A length that does not divide; ranks have heard of it by the second time.
        expected = halves(2 + 2 * bias)
        assert per_block(parts, torch.randn(2, length, 8).requires_grad_()) == (expected[0], expected[1] | copies)


@pytest.mark.ranks(2, 4)
def test_blocks_of_transformers_take_two_sums_each_way() -> None:
    words = torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(0))
    group = group_of(dist.new_group())  # One that has not heard of other lengths, with which these may be confused.
    few: Any = {"num_key_value_heads": 1, "attention_bias": True}
    for options, copies in (({"num_attention_heads": 4, "num_key_value_heads": 4}, {}), (few, {"copies": 4})):
        for sequence_parallel in (False, True):

            def build(number: int, options: Any = options, sequence_parallel: bool = sequence_parallel) -> nn.Module:
                model = llama(num_hidden_layers=number, **options)
                return parallelize(model, None, group, sequence_parallel=sequence_parallel)

            # With biases, that of the attention's output is one; those of keys and values are copies'.
            forward, backward = halves(2 + ("attention_bias" in options)) if sequence_parallel else PLAIN
            assert per_block(build, words) == (forward, backward | copies), (options, sequence_parallel)
    for sequence_parallel in (False, True):

        def build_gpt2(number: int, sequence_parallel: bool = sequence_parallel) -> nn.Module:
            model = gpt2(n_layer=number)
            return parallelize(model, GPT2_PLAN, group, sequence_parallel=sequence_parallel)

        assert per_block(build_gpt2, words) == (halves(4) if sequence_parallel else PLAIN)
