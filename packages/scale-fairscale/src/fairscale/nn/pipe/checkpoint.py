"""Recomputation of functions, and what layers may ask about it: one answer for pipelines and `checkpoint_wrapper`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from scale_checkpoint import checkpoint_wrapper, is_checkpointing, is_recomputing
from scale_checkpoint.state import checkpointing as enable_checkpointing
from scale_checkpoint.state import recomputing as enable_recomputing

__all__ = ["checkpoint", "enable_checkpointing", "enable_recomputing", "is_checkpointing", "is_recomputing"]


class _Call(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self._function = (function,)  # In a tuple, so that a module is not a child of this one.

    def forward(self, input: Any) -> Any:
        return self._function[0](input)


def checkpoint(function: Callable[[Any], Any], input: Any) -> Any:
    """Computes a function of a tensor or tensors, and computes it again in the backward pass."""
    return checkpoint_wrapper(_Call(function))(input)
