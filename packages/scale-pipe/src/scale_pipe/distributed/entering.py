"""What comes into a stage may be changed in place by its first layer, as in the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version


class _Entry(torch.autograd.Function):
    """The identity, without a copy: what comes out is no leaf, so a layer may change it in place."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.data

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def enter(tensor: Tensor) -> Tensor:
    """Returns what a layer gets for a tensor that has come in.

    Args:
        tensor: A leaf where it requires gradients, of any shape.
    """
    entered: Tensor = _Entry.apply(tensor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
    return entered


def note_changes(leaves: Sequence[Tensor], entries: Sequence[Tensor]) -> None:
    """Tells autograd what was changed in place: the stage before may have kept the same memory for its backward.

    Args:
        leaves: What has come in.
        entries: What `enter` has made of them.
    """
    for leaf, entry in zip(leaves, entries, strict=True):
        if entry is not leaf and entry._version:
            increment_version(leaf)
