"""The dtype that sums are made in: fp32, or the summands' own where that is wider.

Half precision loses what is added late, so whatever adds up here widens first and rounds once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to add in: fp32 for half precision, and every other one as it is.

    Example:
        >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64), wide_dtype(torch.int64)
        (torch.float32, torch.float64, torch.int64)
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def wide(tensor: Tensor) -> Tensor:
    """Returns the tensor in that dtype; the same one where it has it."""
    return tensor.to(wide_dtype(tensor.dtype))
