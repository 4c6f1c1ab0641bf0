"""Products of matrices as a linear layer has them, into memory that is there already: arithmetic, nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def rows_of(tensor: Tensor) -> Tensor:
    """[..., features] as [rows, features]."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] else tensor.new_empty(tensor.shape[:-1].numel(), 0)


def multiply(rows: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fills [..., outputs] with [rows, features] times [features, outputs], and a bias."""
    into = out.view(rows.shape[0], factor.shape[1]) if out.is_contiguous() else None
    if bias is None:
        found = torch.mm(rows, factor, out=into)
    else:
        found = torch.addmm(bias, rows, factor, out=into)
    if into is None:
        out.copy_(found.view(out.shape))


def dtype_of_products(input: Tensor, weights: Sequence[Tensor]) -> torch.dtype:
    """What is multiplied in: the dtype of all, or that of autocast.

    Raises:
        ValueError: They have several.
    """
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    for weight in weights:
        if weight.dtype != input.dtype:
            raise ValueError(f"expected a weight of the input's dtype, {input.dtype}, got {weight.dtype}: call .to()")
    return input.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """No autocast: what is multiplied has its dtype already."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
