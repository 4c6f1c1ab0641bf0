"""Squares of gradients, of their parts, and products of two are those of fp64."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.squared_norms import inner_product, part_of, sum_of_squares


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_squares_and_products_are_those_of_fp64(size, dtype):
    # The products of small integers have the same sum in any order.
    one, other = (numbers(size, seed=seed).mul(2).round().to(dtype) for seed in (0, 1))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.vdot(one.to(wide), other.to(wide)).real
    assert sum_of_squares(one).item() == pytest.approx(one.to(wide).abs().square().sum().item(), rel=1e-6)
    assert torch.equal(inner_product(one, other), expected.double())


def test_parts_have_each_element_once():
    grad = numbers(7, 3)
    assert torch.equal(torch.cat([part_of(grad, number, 4) for number in range(4)]), grad.reshape(-1))


@pytest.mark.parametrize("rows", [([1, 2], [3, 4]), ([1, 2], [3, 4, 5]), ([5, 1, 1], [1, 4, 5]), ([0], [])])
def test_sparse_gradients_are_multiplied_where_both_have_rows(rows):
    def sparse(indices: list[int], seed: int) -> torch.Tensor:
        values = numbers(len(indices), 3, seed=seed)
        return torch.sparse_coo_tensor(torch.tensor([indices]), values, (7, 3), check_invariants=True)

    one, other = sparse(rows[0], 1), sparse(rows[1], 2)
    expected = (one.to_dense().double() * other.to_dense().double()).sum()
    torch.testing.assert_close(inner_product(one, other), expected)
    torch.testing.assert_close(inner_product(one, other.to_dense()), expected)


def test_sparse_matrices_of_complex_numbers_are_multiplied_too():
    places = torch.tensor([[0, 0, 2], [1, 3, 0]]), torch.tensor([[2, 0], [0, 3]])
    values = torch.tensor([1 + 2j, 2, 3j]), torch.tensor([1 - 1j, 5j])
    one, other = (
        torch.sparse_coo_tensor(i, v, (3, 4), check_invariants=True) for i, v in zip(places, values, strict=True)
    )
    assert inner_product(one, other).item() == torch.vdot(one.to_dense().view(-1), other.to_dense().view(-1)).real
