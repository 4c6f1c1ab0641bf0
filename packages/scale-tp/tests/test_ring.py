"""ring.py: attention over a divided sequence is attention over the whole one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, divided_attention, own_parts, whole_attention
from torch import Tensor

from scale_core.comm.group import Group, group_of
from scale_tp.attention.load_balance import rank_positions
from scale_tp.attention.ring import blocks, ring_attention

CASES = [
    Case(),
    Case(causal=False),
    Case(length=13, key_value_heads=2, value_size=5),
    Case(length=13, order="contiguous", heads=6, key_value_heads=1),
    Case(length=3, scale=0.7),
    Case(length=1, batch=1),
    Case(length=11, heads=3, key_value_heads=3, causal=False, order="contiguous"),
    Case(length=37, batch=3),
]


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [1, 5, 8, 21])
def test_blocks_of_all_ranks_are_the_pairs_attention_looks_at(length: int, causal: bool, order: str) -> None:
    held = rank_positions(length, 3, order).ranges
    at = [[position for bounds in ranges for position in range(*bounds)] for ranges in held]
    seen = torch.zeros(length, length, dtype=torch.int64)
    for queries in range(3):
        for keys in range(3):
            for rows, num_keys, diagonal in blocks(held[queries], held[keys], causal=causal):
                for number, row in enumerate(at[queries][rows]):
                    seen[row, at[keys][: number + 1 if diagonal else num_keys]] += 1
    expected = torch.ones_like(seen)
    assert torch.equal(seen, expected.tril() if causal else expected)


def test_in_zigzag_order_every_step_is_one_block_of_one_size() -> None:
    held = rank_positions(32, 4).ranges
    for queries in range(4):
        for keys in range(4):
            ((rows, num_keys, diagonal),) = blocks(held[queries], held[keys], causal=True)
            assert diagonal == (queries == keys)
            assert diagonal or (rows.stop - rows.start) * num_keys == 32


def _equals_whole(cases: list[Case]) -> None:
    group = group_of()
    for case in cases:

        def attention(query: Tensor, key: Tensor, value: Tensor, case: Case = case) -> Tensor:
            return ring_attention(
                query, key, value, group, is_causal=case.causal, scale=case.scale, length=case.length, order=case.order
            )

        found = divided_attention(case, group, attention)
        for mine, whole in zip(found, own_parts(case, group, whole_attention(case)), strict=True):
            torch.testing.assert_close(
                mine, whole, rtol=1e-10, atol=1e-10, msg=lambda text, case=case: f"{case}\n{text}"
            )


@pytest.mark.ranks(0, 2, 3, 4)
def test_output_and_gradients_equal_full_attention() -> None:
    _equals_whole(CASES)


@pytest.mark.ranks(2)
def test_bad_input_is_refused_before_anything_is_sent() -> None:
    group = group_of()
    query, key = torch.randn(2, 4, 5, 6), torch.randn(2, 2, 5, 6)
    with pytest.raises(ValueError, match=r"expected heads that are a multiple of the key-value heads"):
        ring_attention(query, torch.randn(2, 3, 5, 6), torch.randn(2, 3, 5, 6), group)
    with pytest.raises(
        ValueError, match=r"expected one floating-point dtype, got query torch.float32, key torch.float64"
    ):
        ring_attention(query, key.double(), key.double(), group)
    with pytest.raises(ValueError, match=r"expected one batch, the same positions and one head size"):
        ring_attention(query, key[:, :, :4], key[:, :, :4], group)
    with pytest.raises(ValueError, match=r"expected \[batch, heads, positions, head size\] each"):
        ring_attention(query[0], key[0], key[0], group)
    with pytest.raises(
        ValueError, match=r"expected \d positions on rank \d of 2, of a sequence of 13 .*split_sequence"
    ):
        ring_attention(query, key, key, group, length=13)
    # Ranks that hold sequences of different lengths are told, where they would read each other's messages.
    length = 5 + group.rank
    uneven = torch.randn(1, 2, length, 4)
    with pytest.raises(ValueError, match=r"rank 0: .*length 10.*; rank 1: .*length 12.*make the same call on all"):
        ring_attention(uneven, uneven, uneven, group)
    # And nothing is broken by that.
    _equals_whole([Case()])


def test_a_padding_mask_is_of_the_whole_sequence() -> None:
    query, key, value, _ = Case().inputs()
    padding = torch.arange(8) >= torch.tensor([[5], [8]])
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=~padding[:, None, None])
    found = ring_attention(query, key, value, key_padding_mask=padding)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    attention_mask = (~padding).long()  # As a tokenizer gives it
    with pytest.raises(
        ValueError,
        match=r"key_padding_mask to be bool \[batch, length\], here \[2, 8\], got torch.int64 .*attention_mask == 0",
    ):
        ring_attention(query, key, value, key_padding_mask=attention_mask)
    found = ring_attention(query, key, value, key_padding_mask=attention_mask == 0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_half_precision_is_computed_in_fp32_and_rounded_once() -> None:
    """The inputs are exact in fp32, so what comes is what fp32 gives, rounded."""
    case = Case(length=33, dtype=torch.bfloat16)
    alone = Group()
    found = divided_attention(case, alone, lambda *tensors: ring_attention(*tensors, alone, is_causal=True))
    for mine, whole in zip(found, whole_attention(case, torch.float32), strict=True):
        assert mine.dtype == torch.bfloat16
        # One unit in the last place, where fp32's own rounding moves a number over a boundary.
        assert (mine.float() - whole).abs().max() <= 2**-8 * whole.abs().max()
        assert (mine == whole.bfloat16()).float().mean() > 0.99


def test_autocast_chooses_the_dtype_only() -> None:
    case = Case(length=9, dtype=torch.float32)
    query, key, value, _ = case.inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = ring_attention(query, key, value, Group())
    assert output.dtype == torch.bfloat16
    halves = [tensor.bfloat16() for tensor in (query, key, value)]
    assert torch.equal(output, ring_attention(*halves, Group()))
