"""Squares of many gradients that are added up together are those of each alone."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.squared_norms import NormAccumulator, inner_product, part_of, sum_of_squares

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_squares_are_those_of_each_gradient_alone(dtype):
    torch.manual_seed(0)
    grads = [torch.randn(shape).to(dtype) for shape in ((3,), (1024,), (0,), (2, 1024), (5, 999), ())]
    accumulator = NormAccumulator(len(grads) + 1, CPU)
    for _ in range(2):
        for number, grad in reversed(list(enumerate(grads))):
            accumulator.set(number, grad)
        expected = torch.stack([*(sum_of_squares(grad) for grad in grads), torch.tensor(0.0, dtype=torch.float64)])
        torch.testing.assert_close(accumulator.squares(), expected, rtol=2e-7, atol=0.0)
        accumulator.clear()
        grads = [2 * grad for grad in grads]


def test_whoever_has_made_a_gradient_may_use_its_memory_again_at_once():
    accumulator, grads = NormAccumulator(3, CPU), [torch.full((size,), 2.0) for size in (3, 5000, 40000)]
    for number, grad in enumerate(grads):
        accumulator.set(number, grad)
        grad.fill_(9.0)
    assert accumulator.squares().tolist() == pytest.approx([12.0, 20000.0, 160000.0])


def test_gradients_of_one_number_may_be_added_and_what_was_cleared_counts_no_more():
    accumulator = NormAccumulator(3, CPU)
    accumulator.set(0, torch.full((2000,), 9.0))
    accumulator.clear()
    assert accumulator.squares().tolist() == [0.0, 0.0, 0.0]
    for value in (1.0, 2.0):
        accumulator.add(1, torch.full((2,), value))
    accumulator.set(2, torch.full((3,), 2.0))
    assert accumulator.squares().tolist() == pytest.approx([0.0, 10.0, 12.0])


def test_a_gradient_may_have_another_size_or_layout_each_time():
    accumulator = NormAccumulator(1, CPU)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 4]]), torch.ones(3, 2), (9, 2), check_invariants=True)
    for grad, expected in ((sparse, 10.0), (torch.ones(1030), 1030.0), (torch.ones(7, 3).T, 21.0), (sparse, 10.0)):
        accumulator.set(0, grad)
        assert accumulator.squares().tolist() == pytest.approx([expected])
        accumulator.clear()


def test_short_gradients_are_measured_however_small_or_large_they_are():
    for value in (1e-30, 1e30):
        accumulator = NormAccumulator(1, CPU)
        accumulator.set(0, torch.full((4,), value))
        assert accumulator.squares().tolist() == pytest.approx([4 * value**2], rel=1e-6)


def test_what_is_read_into_stays_so_that_the_allocator_can_use_gradients_again():
    accumulator = NormAccumulator(1, CPU)
    accumulator.set(0, torch.ones(40960))
    before = accumulator._buffers[0].of_rows.data_ptr()
    accumulator.clear()
    accumulator.set(0, torch.ones(40960))
    assert accumulator._buffers[0].of_rows.data_ptr() == before


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_squares_and_products_are_those_of_fp64(size, dtype):
    one, other = numbers(size).to(dtype), numbers(size, seed=1).to(dtype)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    expected = torch.vdot(one.to(wide), other.to(wide)).real
    assert sum_of_squares(one).item() == pytest.approx(one.to(wide).abs().square().sum().item(), rel=1e-6)
    torch.testing.assert_close(inner_product(one, other), expected.double(), rtol=1e-6, atol=1e-5)


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
