"""chunks.py: products of matrices into memory that is there already."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from scale_tp.async_tp.chunks import matmul_into, product_dtype, to_rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_into_a_part_of_a_tensor_is_a_linear_layer(dtype: torch.dtype, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 16, dtype=dtype), torch.randn(7, 16, dtype=dtype)
    bias = torch.randn(7, dtype=dtype) if has_bias else None
    expected = F.linear(x, weight, bias)
    for whole, place in (
        (torch.zeros(2, 5, 7, dtype=dtype), slice(None)),
        (torch.zeros(2, 9, 7, dtype=dtype), slice(1, 6)),
    ):
        matmul_into(to_rows(x), weight.mT, bias, whole[:, place])
        assert torch.equal(whole[:, place], expected)
        assert not whole[:, :0].any() and whole.count_nonzero() == expected.count_nonzero()


def test_without_features_the_rows_are_still_there() -> None:
    out = torch.ones(2, 3, 4)
    matmul_into(to_rows(torch.zeros(2, 3, 0)), torch.zeros(0, 4), None, out)
    assert not out.any() and to_rows(torch.zeros(2, 3, 0)).shape == (6, 0)


def test_what_is_multiplied_has_one_dtype_or_that_of_autocast() -> None:
    x, half = torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.bfloat16)
    assert product_dtype(x, [x]) == torch.float32
    with pytest.raises(ValueError, match=r"a weight of the input's dtype, torch.float32, got torch.bfloat16: call .to"):
        product_dtype(x, [half])
    with torch.autocast("cpu", torch.bfloat16):
        assert product_dtype(x, [half]) == torch.bfloat16
        assert product_dtype(x.double(), [x.double()]) == torch.float64  # Which autocast leaves as it is.
