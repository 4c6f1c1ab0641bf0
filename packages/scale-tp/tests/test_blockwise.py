"""blockwise.py: attention over parts of the keys, merged, is attention over all of them."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from scale_tp.attention import blockwise
from scale_tp.attention.blockwise import (
    PartialAttention,
    block_attention,
    block_attention_backward,
    merge_partial,
)


def _inputs(length: int = 6) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2, 3, length, 4), (2, 2, length, 4), (2, 2, length, 5))
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def _expected(diagonal: bool) -> list[torch.Tensor]:
    query, key, value = (tensor.requires_grad_() for tensor in _inputs())
    flat, keys, values = query.flatten(1, 2), key.repeat_interleave(3, 1), value.repeat_interleave(3, 1)
    output = F.scaled_dot_product_attention(flat, keys, values, is_causal=diagonal, scale=0.3).unflatten(1, (2, 3))
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), output.detach().cos())]


@pytest.mark.parametrize("piece", [1, 40, 1 << 22])
@pytest.mark.parametrize("diagonal", [True, False])
def test_a_block_equals_torch_whatever_pieces_it_is_taken_in(
    diagonal: bool, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blockwise, "_PIECE", piece)
    output, *gradients = _expected(diagonal)
    query, key, value = _inputs()
    found = block_attention(query, key, value, scale=0.3, diagonal=diagonal)
    torch.testing.assert_close(found.output, output, rtol=0, atol=1e-10)
    given = output.cos()
    offset = (given * found.output).sum(-1)
    parts = block_attention_backward(given, offset, found.lse, query, key, value, scale=0.3, diagonal=diagonal)
    for mine, whole in zip(parts, gradients, strict=True):
        torch.testing.assert_close(mine, whole, rtol=0, atol=1e-10)


def test_blocks_over_parts_of_the_keys_merge_in_any_order() -> None:
    query, key, value = _inputs()
    output, *_ = _expected(False)
    for cuts in ((0, 2, 6), (0, 1, 5, 6)):
        total = PartialAttention(
            torch.zeros_like(output), torch.full(output.shape[:-1], -torch.inf, dtype=output.dtype)
        )
        for start, stop in reversed(list(itertools.pairwise(cuts))):
            part = block_attention(query, key[:, :, start:stop], value[:, :, start:stop], scale=0.3, diagonal=False)
            merge_partial(total, slice(0, 6), part)
        torch.testing.assert_close(total.output, output, rtol=0, atol=1e-10)


def test_scores_too_large_for_their_exponentials_are_no_matter() -> None:
    query, key, value = _inputs()
    total = PartialAttention(torch.zeros(2, 2, 3, 6, 5).double(), torch.full((2, 2, 3, 6), -torch.inf).double())
    for half in (slice(0, 3), slice(3, 6)):
        merge_partial(
            total,
            slice(0, 6),
            block_attention(1e4 * query, key[:, :, half], value[:, :, half], scale=1.0, diagonal=False),
        )
    one_hot = (1e4 * query @ key[:, :, None].mT).softmax(-1) @ value[:, :, None]
    torch.testing.assert_close(total.output, one_hot, rtol=0, atol=1e-10)
