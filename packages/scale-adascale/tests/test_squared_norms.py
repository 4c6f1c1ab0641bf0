"""Squares of many gradients that are added up together are those of each alone."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.squared_norms import Tally, sum_of_squares

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_the_squares_are_those_of_each_gradient_alone(dtype):
    torch.manual_seed(0)
    grads = [torch.randn(shape).to(dtype) for shape in ((3,), (1024,), (0,), (2, 1024), (5, 999), ())]
    tally = Tally(len(grads) + 1, CPU)
    for _ in range(2):
        for number, grad in reversed(list(enumerate(grads))):
            tally.take(number, grad)
        expected = torch.stack([*(sum_of_squares(grad) for grad in grads), torch.tensor(0.0, dtype=torch.float64)])
        torch.testing.assert_close(tally.squares(), expected, rtol=2e-7, atol=0.0)
        tally.clear()
        grads = [2 * grad for grad in grads]


def test_whoever_has_made_a_gradient_may_use_its_memory_again_at_once():
    tally, grads = Tally(3, CPU), [torch.full((size,), 2.0) for size in (3, 5000, 40000)]
    for number, grad in enumerate(grads):
        tally.take(number, grad)
        grad.fill_(9.0)
    assert tally.squares().tolist() == pytest.approx([12.0, 20000.0, 160000.0])


def test_gradients_of_one_number_may_be_added_and_what_was_cleared_counts_no_more():
    tally = Tally(3, CPU)
    tally.take(0, torch.full((2000,), 9.0))
    tally.clear()
    assert tally.squares().tolist() == [0.0, 0.0, 0.0]
    for value in (1.0, 2.0):
        tally.add(1, torch.full((2,), value))
    tally.take(2, torch.full((3,), 2.0))
    assert tally.squares().tolist() == pytest.approx([0.0, 10.0, 12.0])


def test_a_gradient_may_have_another_size_or_layout_each_time():
    tally = Tally(1, CPU)
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1, 4]]), torch.ones(3, 2), (9, 2), check_invariants=True)
    for grad, expected in ((sparse, 10.0), (torch.ones(1030), 1030.0), (torch.ones(7, 3).T, 21.0), (sparse, 10.0)):
        tally.take(0, grad)
        assert tally.squares().tolist() == pytest.approx([expected])
        tally.clear()


def test_short_gradients_are_measured_however_small_or_large_they_are():
    for value in (1e-30, 1e30):
        tally = Tally(1, CPU)
        tally.take(0, torch.full((4,), value))
        assert tally.squares().tolist() == pytest.approx([4 * value**2], rel=1e-6)


def test_what_is_read_into_stays_so_that_the_allocator_can_use_gradients_again():
    tally = Tally(1, CPU)
    tally.take(0, torch.ones(40960))
    before = tally._places[0].of_rows.data_ptr()
    tally.clear()
    tally.take(0, torch.ones(40960))
    assert tally._places[0].of_rows.data_ptr() == before
