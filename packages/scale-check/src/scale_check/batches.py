"""The batches of all ranks together, as `parity` takes them: their dtype, and the part of each rank."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def converted_batches(batches: Iterable[Any], dtype: torch.dtype | None, num_parts: int) -> tuple[Any, ...]:
    """The batches with floating-point tensors in `dtype`, or unchanged if it is None; each divides into `num_parts`.

    Raises:
        ValueError: A batch has no samples, samples that don't divide, or not only tensors, numbers and texts.
    """

    def converted(leaf: Any) -> Any:
        return leaf.to(dtype) if dtype is not None and isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    all_batches = tuple(pytree.tree_map(converted, batch) for batch in batches)
    for batch in all_batches:
        _check_divides(pytree.tree_leaves(batch), num_parts)
    return all_batches


def part_of(batch: Any, rank: int, num_ranks: int) -> Any:
    """The samples of a rank, [samples / num_ranks, ...] of each tensor [samples, ...]; numbers and texts stay.

    >>> part_of({"x": torch.arange(4), "scale": 2.0}, rank=1, num_ranks=2)
    {'x': tensor([2, 3]), 'scale': 2.0}
    """

    def part(leaf: Any) -> Any:
        return leaf.chunk(num_ranks)[rank] if isinstance(leaf, Tensor) and leaf.ndim else leaf

    return pytree.tree_map(part, batch)


def _check_divides(leaves: list[Any], num_parts: int) -> None:
    for leaf in leaves:
        if not isinstance(leaf, Tensor | int | float | str | bytes | None):
            raise ValueError(
                f"parity: expected batches of tensors in lists, tuples and dicts, got a {type(leaf).__name__}, "
                "which can't be divided between the ranks: pass its tensors, and build it in step"
            )
    if num_parts > 1 and not any(isinstance(leaf, Tensor) and leaf.ndim for leaf in leaves):
        raise ValueError("parity: expected tensors of samples in each batch, got none, so there is nothing to divide")
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] % num_parts:
            raise ValueError(
                f"parity: expected samples that {num_parts} ranks divide evenly, got a batch with a tensor of shape "
                f"{tuple(leaf.shape)}: take a multiple of {num_parts}, or data='all'"
            )
