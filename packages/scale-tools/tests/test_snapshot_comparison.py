import math

import pytest
import torch

from scale_tools.snapshot.comparison import compare_tensors

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.complex64]
)
def test_the_largest_difference_and_how_many_differ(dtype):
    one, other = (torch.tensor(values).to(dtype) for values in ([1, 2, 3, 4], [1, 2, 5, 3]))
    found = compare_tensors("w", one, other, 0.0)
    assert found is not None and (found.max_abs_diff, found.num_different, found.num_elements) == (2.0, 2, 4)
    assert compare_tensors("w", one, other, 2.0) is None
    assert compare_tensors("w", one, one.clone(), 0.0) is None


def test_bits_of_equal_numbers_differ_without_a_tolerance():
    found = compare_tensors("w", torch.tensor([0.0]), torch.tensor([-0.0]), 0.0)
    assert found is not None and (found.max_abs_diff, found.num_different) == (0.0, 1)
    assert compare_tensors("w", torch.tensor([0.0]), torch.tensor([-0.0]), 1e-9) is None


def test_a_nan_on_one_side_is_an_infinite_difference():
    one, other = torch.tensor([NAN, INF, 1.0]), torch.tensor([NAN, INF, 1.0])
    assert compare_tensors("w", one, other, 0.1) is None
    found = compare_tensors("w", one, torch.tensor([NAN, 1.0, NAN]), 0.1)
    assert found is not None and (found.max_abs_diff, found.num_different) == (INF, 2)


def test_booleans_and_scalars_are_compared():
    assert compare_tensors("w", torch.tensor(True), torch.tensor(True), 0.0) is None
    found = compare_tensors("w", torch.tensor(True), torch.tensor(False), 0.0)
    assert found is not None and found.num_different == 1
