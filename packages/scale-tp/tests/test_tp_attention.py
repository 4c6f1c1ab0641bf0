"""attention.py: divided heads compute what all heads compute, and begin with the same values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from with_options import with_options

from scale_core import clip_grad_norm_
from scale_core.comm.group import Group, group_of
from scale_tp.attention.ring import ring_attention
from scale_tp.layers.attention import ParallelAttention
from scale_tp.layers.options import LayerOptions
from scale_tp.state_dict import full_state_dict

CASES: list[dict[str, Any]] = [
    {"num_heads": 6, "causal": True},
    {"num_heads": 6, "num_key_value_heads": 3, "bias": True},
    {"num_heads": 4, "num_key_value_heads": 2, "head_dim": 5},
    {"num_heads": 3, "num_key_value_heads": 1, "head_dim": 2, "bias": True, "causal": True},
    {"num_heads": 2, "num_key_value_heads": 1, "head_dim": 3},  # some ranks of three have no head
]


def _input(length: int = 5) -> Tensor:
    return torch.randn(2, length, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _built(case: dict[str, Any], group: Group, **changed: Any) -> ParallelAttention:
    torch.manual_seed(3)
    arguments = with_options(LayerOptions, **case, process_group=group, dtype=torch.float64, **changed)
    return ParallelAttention(12, **arguments)


def _train(model: ParallelAttention, part: slice) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    found = []
    for step in range(3):
        data = (_input() + step).requires_grad_()
        output = model(data[:, part])
        weights = torch.arange(output.numel(), dtype=output.dtype).view_as(output).sin()
        optimizer.zero_grad()
        # On a part of the sequence, the loss is a part of the sum.
        whole = torch.arange(data.numel(), dtype=output.dtype).view_as(data).sin()
        (output * (whole[:, part] if part != slice(None) else weights)).sum().backward()
        found += [output.detach(), data.grad[:, part]]
        optimizer.step()
    return found


@pytest.mark.ranks(2, 3)
def test_it_trains_as_on_one_process() -> None:
    group = group_of()
    sizes = [5 // group.size + (rank < 5 % group.size) for rank in range(group.size)]
    part = slice(sum(sizes[: group.rank]), sum(sizes[: group.rank + 1]))
    for case in CASES:
        plain, model = _built(case, Group()), _built(case, group)
        before = full_state_dict(model)
        assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items()), case
        expected = _train(plain, slice(None))
        for mine, whole in zip(_train(model, slice(None)), expected, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-10, atol=1e-10)
        norms = [clip_grad_norm_(list(each.parameters()), 1e9) for each in (plain, model)]
        torch.testing.assert_close(norms[1], norms[0], rtol=1e-10, atol=0)
        for pieces in (None, 2):
            divided = _built(case, group, sequence_parallel=True, overlap_pieces=pieces)
            for mine, whole in zip(_train(divided, part), expected, strict=True):
                torch.testing.assert_close(mine, whole[:, part], rtol=1e-10, atol=1e-10)
        meta = _built(case, group, device="meta").to_empty(device="cpu")
        torch.manual_seed(3)
        meta.reset_parameters()
        assert all(torch.equal(value, before[name]) for name, value in full_state_dict(meta).items())


def test_any_attention_of_this_rank_s_heads_may_compute() -> None:
    def ring(query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool) -> Tensor:
        return ring_attention(query, key, value, Group(), is_causal=is_causal)

    case = {"num_heads": 4, "num_key_value_heads": 2, "causal": True}
    outputs = [_built(case, Group(), **options)(_input()) for options in ({}, {"attend": ring})]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_heads": 5}, r"expected embed_dim to divide by num_heads, got 12 and 5: pass head_dim= as well"),
        (
            {"num_heads": 6, "num_key_value_heads": 4},
            r"expected query heads that divide by the key-value heads, got 6 and",
        ),
        ({"num_heads": 0}, r"expected num_heads to be at least 1, got 0"),
        ({"num_heads": 3, "head_dim": 0}, r"expected head_dim to be at least 1, got 0"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParallelAttention(12, **sizes)


def test_an_input_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected \[batch, positions, 12\], got \(2, 5, 11\)"):
        ParallelAttention(12, 3)(torch.zeros(2, 5, 11))
