"""Sizes that ranks divide."""

from scale_tp import (
    VocabUtility,
    divide_and_check_no_remainder,
    ensure_divisibility,
    split_tensor_along_last_dim,
)

__all__ = [
    "VocabUtility",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "split_tensor_along_last_dim",
]
