"""ulysses.py: attention over a divided sequence is attention over the whole one, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from attention_cases import Case, divided_attention, own_parts, whole_attention
from torch import Tensor

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, group_of
from scale_tp.attention.load_balance import join_sequence, split_sequence
from scale_tp.attention.ring import ring_attention
from scale_tp.attention.ulysses import ulysses_attention
from scale_tp.parallel_state import destroy_model_parallel, initialize_model_parallel

CASES = [
    Case(order="contiguous"),
    Case(length=13, heads=5, key_value_heads=5, order="contiguous", value_size=5),
    Case(length=13, heads=6, key_value_heads=3, causal=False),
    Case(length=7, heads=6, key_value_heads=2),
    Case(length=7, heads=4, key_value_heads=1),
    Case(length=2, heads=2, key_value_heads=1, order="contiguous"),  # fewer heads and positions than some worlds' ranks
]


@pytest.mark.ranks(0, 2, 3, 4)
def test_output_and_gradients_equal_full_attention() -> None:
    group = group_of()
    for case in CASES:

        def attention(query: Tensor, key: Tensor, value: Tensor, case: Case = case) -> Tensor:
            return ulysses_attention(
                query, key, value, group, length=case.length, order=case.order, is_causal=case.causal
            )

        found = divided_attention(case, group, attention)
        expected = own_parts(case, group, whole_attention(case))
        for mine, whole in zip(found, expected, strict=True):
            torch.testing.assert_close(
                mine, whole, rtol=1e-10, atol=1e-10, msg=lambda text, case=case: f"{case}\n{text}"
            )


def _attention_by_head(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Each head by itself, so that its numbers do not depend on how many others there are."""
    heads = zip(*([head.contiguous() for head in tensor.unbind(1)] for tensor in (query, key, value)), strict=True)
    return torch.stack([F.softmax(q @ k.mT.contiguous(), -1) @ v for q, k, v in heads], 1)


@pytest.mark.ranks(2)
def test_without_a_group_the_context_axis_divides() -> None:
    """It is the context axis, not all ranks: those of the model axis have other heads."""
    part = torch.randn(1, 2, 4, 3)
    for act in (ulysses_attention, ring_attention):
        with pytest.raises(
            ValueError, match=r"2 ranks have not been divided yet.*pass process_group=.*context_parallel_size=2"
        ):
            act(part, part, part)
    initialize_model_parallel(2)
    try:
        torch.manual_seed(group_of().rank)
        query, key, value = (torch.randn(1, 1, 4, 3) for _ in range(3))
        expected = F.scaled_dot_product_attention(query, key, value)
        assert torch.equal(ulysses_attention(query, key, value), expected)
        torch.testing.assert_close(ring_attention(query, key, value), expected)
        for order in ("zigzag", "contiguous"):
            assert torch.equal(split_sequence(query, dim=2, order=order), query)
            assert torch.equal(join_sequence(query, dim=2, order=order), query)
    finally:
        destroy_model_parallel()


@pytest.mark.ranks(2)
def test_attention_by_single_heads_gives_the_same_bits() -> None:
    group = group_of()
    case = Case(length=9, heads=3, key_value_heads=3, batch=1, dtype=torch.float32, causal=False)
    found = divided_attention(
        case, group, lambda *t: ulysses_attention(*t, group, attention=_attention_by_head, length=9, order="zigzag")
    )
    whole = divided_attention(
        Case(**{**vars(case), "order": "contiguous"}), Group(), lambda q, k, v: _attention_by_head(q, k, v)
    )
    assert all(torch.equal(mine, part) for mine, part in zip(found, own_parts(case, group, whole), strict=True))
    with pytest.raises(ValueError, match=r"expected attention to return \[batch, heads, positions, value size\], here"):
        ulysses_attention(*(torch.zeros(1, 2, 3, 4),) * 3, group, attention=lambda q, k, v: q[..., :1])
    with pytest.raises(ValueError, match=r"ulysses_attention: expected one batch, the same positions"):
        ulysses_attention(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4), group)
    # Gradients of gradients.
    whole, *_ = Case(length=4, heads=2, key_value_heads=2).inputs()
    part = whole[:, :, :2].clone().requires_grad_()
    output = ulysses_attention(part, part, part, group, attention=_attention_by_head)
    (first,) = torch.autograd.grad(output.square().sum(), part, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), part)
    assert second.abs().max() > 0
    # Heads on two ranks lose other elements, and afterwards random numbers go on alike.
    torch.manual_seed(3)
    ones = torch.ones(1, 2, 4, 1)
    dropped = ulysses_attention(0 * ones, 0 * ones, ones, group, dropout_p=0.5)
    assert not torch.equal(dropped[:, 0], dropped[:, 1])
    numbers = exchange([int(torch.randint(1 << 30, ()))], group)
    assert numbers[0] == numbers[1]
