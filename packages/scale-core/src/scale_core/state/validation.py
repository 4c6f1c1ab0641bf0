"""Checks that a saved state belongs to this model and optimizer, before anything is written.

Only names, shapes and dtypes are compared, since a snapshot is compared before it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scale_core.errors import ScaleError


@dataclass(frozen=True)
class SavedTensor:
    """The shape of a saved whole tensor, and its dtype."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class StateMismatch(ScaleError, ValueError):
    """A saved state is that of another model or optimizer; the message names the first entry that differs."""


def check_keys(own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Compares the names of two states."""
    missing, unexpected = [key for key in own if key not in given], [key for key in given if key not in own]
    if missing or unexpected:
        first = f"{missing[0]} is missing" if missing else f"{unexpected[0]} is unexpected"
        raise StateMismatch(
            f"the state is that of another model or optimizer: {first} in it "
            f"(missing: {_some(missing)}; unexpected: {_some(unexpected)})"
        )


def check_alike(key: str, saved: SavedTensor, piece: SavedTensor | Tensor) -> None:
    """Compares a saved tensor with the place it goes to."""
    if saved.shape != tuple(piece.shape):
        raise StateMismatch(f"{key}: the saved shape is {saved.shape}, expected {tuple(piece.shape)}")
    if saved.dtype != piece.dtype:
        raise StateMismatch(
            f"{key}: the saved dtype is {saved.dtype}, expected {piece.dtype}: build the model in {saved.dtype}, "
            "load, and convert it then"
        )


def _some(keys: list[str], limit: int = 10) -> str:
    more = f" and {len(keys) - limit} more" if len(keys) > limit else ""
    return (", ".join(keys[:limit]) or "none") + more
