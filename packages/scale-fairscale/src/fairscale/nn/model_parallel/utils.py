"""Sizes that ranks divide."""

from scale_tp.megatron import VocabUtility, ensure_divisibility, split_tensor_along_last_dim
from scale_tp.megatron import divide as divide_and_check_no_remainder

__all__ = [
    "VocabUtility",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "split_tensor_along_last_dim",
]
