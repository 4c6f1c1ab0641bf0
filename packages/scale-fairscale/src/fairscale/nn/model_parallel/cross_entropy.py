"""The cross entropy of logits whose vocabulary ranks divide."""

from scale_tp import (
    vocab_parallel_cross_entropy,
)

__all__ = [
    "vocab_parallel_cross_entropy",
]
