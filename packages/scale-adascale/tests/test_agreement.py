"""Whether ranks have averaged their gradients, by one number."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.agreement import bits_of, factor_of, fingerprint, own_part
from scale_core.group import Group


def total(size: int, grads: list[torch.Tensor], shapes: list[int]) -> float:
    """What the summands of all ranks sum up to."""
    groups = [Group(rank, size, None, "fake", tuple(range(size))) for rank in range(size)]
    cpu = torch.device("cpu")
    parts = zip(groups, grads, shapes, strict=True)
    return sum(own_part(group, shape, [None, grad], cpu).item() for group, grad, shape in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 250, 1024])
def test_the_factors_of_all_ranks_sum_up_to_zero(size):
    factors = [factor_of(rank, size) for rank in range(size)]
    assert sum(factors) == 0 and all(abs(factor) <= 250 for factor in factors)
    assert size == 1 or any(factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_equal_gradients_give_zero_and_one_other_bit_does_not(size, dtype):
    grad = torch.randn(5, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    other = grad.clone()
    other[2, 3] *= 1 + (2.0**-7 if dtype is torch.bfloat16 else 2.0**-23)
    assert total(size, [grad] * size, [7] * size) == 0.0
    assert total(size, [grad] * (size - 1) + [other], [7] * size) != 0.0
    assert total(size, [grad] * size, [7] * (size - 1) + [8]) != 0.0


def test_two_stages_of_two_replicas_are_other_parts_in_any_order_of_ranks():
    one, two = torch.ones(3), torch.full((3,), 1.5)
    for order in ([one, two, one, two], [one, one, two, two], [one, two, two, one]):
        assert total(4, order, [0] * 4) != 0.0


def test_a_gradient_that_is_sparse_or_has_no_order_in_memory_has_bits_too():
    dense = torch.arange(12.0).reshape(4, 3)
    assert bits_of(dense.T.contiguous().T) == bits_of(dense)
    assert bits_of(dense.to_sparse(1)) == bits_of(dense)


def test_shapes_and_their_order_make_the_fingerprint():
    a, b = torch.ones(2, 3), torch.ones(4)
    assert fingerprint([a, b]) == fingerprint([a + 1, b]) != fingerprint([b, a])
