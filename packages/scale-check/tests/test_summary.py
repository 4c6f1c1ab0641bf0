"""Sums of large tensors are compared as the tensors would be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from scale_check import ParityVerdict, Report
from scale_check.comparison import compare
from scale_check.recording import Key, Phase, Recording
from scale_check.summary import WHOLE_NUMEL, Recorded, Summary, cat, float_values, kept, scaled, total

WEIGHT = Key(1, Phase.WEIGHT, "weight")


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def compare_sums(plain: Tensor, *ranks: Tensor, key: Key = WEIGHT) -> Report:
    recordings = [Recording({key: Summary.of(tensor)}) for tensor in (plain, *ranks)]
    return compare(recordings[0], recordings[1:], {key: 1e-14})


def assert_same(value: Recorded, tensor: Tensor) -> None:
    torch.testing.assert_close(float_values(value), float_values(Summary.of(tensor)), rtol=0, atol=1e-13)


def test_small_tensors_and_numbers_are_kept_as_they_are() -> None:
    assert isinstance(kept(torch.zeros(WHOLE_NUMEL)), Tensor)
    assert isinstance(kept(torch.tensor(1.0)), Tensor)
    assert isinstance(kept(torch.zeros(WHOLE_NUMEL + 1)), Summary)
    assert isinstance(kept(torch.zeros(WHOLE_NUMEL + 1), as_it_is=True), Tensor)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sums_of_parts_are_put_together(dim: int) -> None:
    tensor = drawn(4, 6, 5)
    parts = tensor.split([1, tensor.shape[dim] - 1], dim)
    assert_same(cat([Summary.of(part) for part in parts], dim), tensor)
    assert_same(cat([Summary.of(parts[0]), parts[1]], dim), tensor)


def test_sums_are_added_and_multiplied() -> None:
    first, second = drawn(4, 6), drawn(6, 4).t()
    assert_same(total([Summary.of(first), second]), first + second)
    assert_same(scaled(Summary.of(first), 0.5), first * 0.5)


def test_a_vector_is_its_own_sums() -> None:
    vector = drawn(7)
    summary = Summary.of(vector)
    Summary.of(torch.zeros(7))  # Takes the same memory for its own.
    assert torch.equal(summary.values(), vector)


@pytest.mark.parametrize("dim", [0, 1])
def test_parts_of_the_ranks_are_equal_to_one_process(dim: int) -> None:
    tensor = drawn(4, 6)
    assert compare_sums(tensor, *tensor.chunk(2, dim)).verdict is not ParityVerdict.BUG


def exchange_rows(tensor: Tensor) -> Tensor:
    return tensor[[1, 0, 2, 3]]


def change_one(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed[2, 3] += 1e-9
    return changed


@pytest.mark.parametrize("bug", [torch.t, exchange_rows, change_one, torch.neg])
def test_a_bug_in_a_large_tensor_is_found(bug: Callable[[Tensor], Tensor]) -> None:
    tensor = drawn(4, 4)
    report = compare_sums(tensor, tensor, bug(tensor))
    assert report.verdict is ParityVerdict.BUG
    assert report.first is not None and report.first.ranks == (1,) and None in report.first.index
    assert report.differences == (report.first,)


def test_a_difference_of_sums_says_which_elements_are_summed() -> None:
    tensor = drawn(4, 4)
    report = compare_sums(tensor, tensor + torch.eye(4)[1] * 8)
    assert report.first is not None and report.first.index == (None, 1)
    column = float(tensor[:, 1].sum())
    assert (report.first.expected, report.first.actual) == pytest.approx((column, column + 32))
    assert "at [:, 1] one process has a sum of " in str(report)


def test_equal_sums_are_not_called_equal_to_the_bit() -> None:
    assert compare_sums(drawn(4, 4), drawn(4, 4)).verdict is ParityVerdict.ROUNDING
