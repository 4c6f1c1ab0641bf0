"""What a recording keeps of a tensor that is too large to be kept: its sums along each dimension.

Sums can be put together as the tensors can. If the ranks have parts of a tensor, the sums along the dimension in which
it is cut are the sums of the parts, one after the other, and the sums along any other dimension add up. The same is
true of tensors that are added or multiplied by a number. An error in one element changes a sum in every dimension.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod, sqrt

import torch
from torch import Tensor

WHOLE_NUMEL = 2**14
"""The largest number of elements of a tensor that is kept in full."""

_BLOCK_NUMEL = 2**22  # Elements of a large tensor that are converted to float64 at a time.


@dataclass(frozen=True)
class Summary:
    """The sums of a tensor.

    Attributes:
        shape: The shape of the tensor.
        dtype: Its dtype.
        sums: For each dimension, float64 [shape[dim]]: the sums of the elements with equal index in this dimension.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    sums: tuple[Tensor, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Summary:
        """Sums up a tensor of at least one dimension."""
        real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        if real.numel() > _BLOCK_NUMEL and len(real) > 1:
            num_rows = max(1, _BLOCK_NUMEL * len(real) // real.numel())
            value = cat([cls.of(block) for block in real.split(num_rows)], 0)
            assert isinstance(value, Summary)
            return replace(value, dtype=tensor.dtype)
        rows = _wide_rows(real)
        if real.ndim == 1:
            return cls(tuple(real.shape), tensor.dtype, (rows[0].clone(),))
        sums = [rows.sum(0)]
        row_sums = rows.sum(1).view(real.shape[:-1])
        while row_sums.ndim > 1:  # The other dimensions have the sums of a tensor without the last one.
            sums.insert(0, row_sums.sum(list(range(row_sums.ndim - 1))))
            row_sums = row_sums.sum(-1)
        sums.insert(0, row_sums)
        return cls(tuple(real.shape), tensor.dtype, tuple(sums))

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements of the tensor."""
        return prod(self.shape)

    def values(self) -> Tensor:
        """All sums in a row, each divided by the square root of the number of its elements, float64.

        The rounding of such a value is about as large as the rounding of one element of the tensor.
        """
        return torch.cat([sums / sqrt(self.numel_of_sum(dim)) for dim, sums in enumerate(self.sums)])

    def numel_of_sum(self, dim: int) -> float:
        """The number of elements of each sum along a dimension."""
        return self.numel() / max(1, self.shape[dim])

    def place(self, position: int) -> tuple[int, int]:
        """The dimension, and the index in it, of a position in `values`."""
        for dim, size in enumerate(self.shape):
            if position < size:
                return dim, position
            position -= size
        raise IndexError(position)


class _Scratch(threading.local):
    """Memory for one block in float64. Fresh memory would take longer to come than the sums take."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.float64)


_scratch = _Scratch()


def _wide_rows(tensor: Tensor) -> Tensor:
    """A tensor in float64, [elements of all other dimensions, shape[-1]], until the next call in this thread.

    `sum` with a dtype of its own would take five times as long.
    """
    if tensor.numel() > _scratch.block.numel():
        _scratch.block = torch.empty(tensor.numel(), dtype=torch.float64)
    wide = _scratch.block[: tensor.numel()].view(tensor.shape)
    return wide.copy_(tensor).view(-1, tensor.shape[-1])


Recorded = Tensor | Summary


def kept(tensor: Tensor, *, as_it_is: bool = False) -> Recorded:
    """The tensor, or its sums if it is large."""
    return tensor if as_it_is or tensor.numel() <= WHOLE_NUMEL or not tensor.ndim else Summary.of(tensor)


def in_one_form(values: Sequence[Recorded]) -> Sequence[Tensor] | Sequence[Summary]:
    """The same values, all as tensors, or all as sums if one of them is kept as such."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    if len(tensors) == len(values):
        return tensors
    return [Summary.of(value) if isinstance(value, Tensor) else value for value in values]


def cat(values: Sequence[Recorded], dim: int) -> Recorded:
    """Puts parts together along a dimension."""
    parts = in_one_form(values)
    if isinstance(parts[0], Tensor):
        return torch.cat([part.to(parts[0].dtype) for part in parts if isinstance(part, Tensor)], dim)
    summaries = [part for part in parts if isinstance(part, Summary)]
    shape = list(summaries[0].shape)
    shape[dim] = sum(part.shape[dim] for part in summaries)
    by_dim = zip(*(part.sums for part in summaries), strict=True)
    sums = [torch.cat(of_dim) if other == dim else torch.stack(of_dim).sum(0) for other, of_dim in enumerate(by_dim)]
    return Summary(tuple(shape), summaries[0].dtype, tuple(sums))


def total(values: Sequence[Recorded]) -> Recorded:
    """Adds values of one shape."""
    summands = in_one_form(values)
    if isinstance(summands[0], Tensor):
        wide = [summand.double() for summand in summands if isinstance(summand, Tensor)]
        return torch.stack(wide).sum(0).to(summands[0].dtype)
    summaries = [summand for summand in summands if isinstance(summand, Summary)]
    by_dim = zip(*(summand.sums for summand in summaries), strict=True)
    sums = tuple(torch.stack(of_dim).sum(0) for of_dim in by_dim)
    return Summary(summaries[0].shape, summaries[0].dtype, sums)


def scaled(value: Recorded, factor: float) -> Recorded:
    """Multiplies a value by a number."""
    if isinstance(value, Tensor):
        return value * factor
    return Summary(value.shape, value.dtype, tuple(sums * factor for sums in value.sums))


def float_values(value: Recorded) -> Tensor:
    """The numbers to compare, in a row, float64: the elements, or the sums."""
    if isinstance(value, Summary):
        return value.values()
    return (torch.view_as_real(value) if value.is_complex() else value).double().flatten()
