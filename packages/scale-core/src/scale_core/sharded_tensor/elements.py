"""The elements of a tensor that a rank has, of its views, and of results of functions: numbers in, numbers out.

A rank has the elements [start, stop) of a tensor in row-major order, or of some of its indices (`ranges`, as of
columns). A view in another shape has the same elements; a slice along the first dimension has the elements that lie in
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from scale_core.shard import Ranges, Shard, elements_of
from scale_core.sharded_tensor.chunks import sizes_of


def local_shape(shape: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Returns the shape in which a rank has the elements [start, stop): rows if it has complete rows, else 1-D.

    >>> local_shape((4, 3), 0, 6), local_shape((4, 3), 0, 5), local_shape((4, 3), 12, 12)
    ((2, 3), (5,), (0, 3))
    """
    shape = tuple(shape)
    if start == stop:
        return (0, *shape[1:])
    if stop - start == math.prod(shape):
        return shape
    dim = next((dim for dim, size in enumerate(shape) if size > 1), 0)
    row = math.prod(shape[dim + 1 :])
    if start % row or stop % row:
        return (stop - start,)
    return (*shape[:dim], (stop - start) // row, *shape[dim + 1 :])


def same_elements(shard: Shard, other: Shard) -> bool:
    """Whether both tensors have the same elements on every rank."""
    if shard is other:
        return True
    same_part = (shard.shape, shard.start, shard.stop, shard.ranges) == (
        other.shape,
        other.start,
        other.stop,
        other.ranges,
    )
    # Parameters of one shape may be cut in different places of their units on some ranks, which this rank can't see.
    return same_part and shard.axes == other.axes and (shard.name == other.name or not shard.gathered)


def is_range(shard: Shard) -> bool:
    """Whether each rank has one contiguous range of elements, as for a unit's parameters; a layer may have columns."""
    return shard.gathered and not shard.ranges and len(shard.divided_groups) == 1


def reshaped(shard: Shard, shape: tuple[int, ...]) -> Shard | None:
    """Returns the record of a view in another shape, with the same elements.

    Elements that are no range have one in a shape with a single dimension longer than 1, as after `flatten`. For other
    shapes it is None.
    """
    if shape == shard.shape:
        return shard
    if is_range(shard):
        return replace(shard, shape=shape)
    if sum(size != 1 for size in shape) != 1:
        return None
    if not shard.ranges:
        return replace(shard, shape=shape)
    flat = flat_ranges(shard.shape, shard.ranges)
    return replace(shard, shape=shape, ranges=tuple(((0, 1),) if size == 1 else flat for size in shape))


def flat_ranges(shape: Sequence[int], ranges: Ranges) -> tuple[tuple[int, int], ...]:
    """Returns the ranges that some indices of each dimension are in the flattened tensor.

    >>> flat_ranges((3, 4), (((0, 3),), ((1, 3),))), flat_ranges((3, 4), (((1, 3),), ((0, 4),)))
    (((1, 3), (5, 7), (9, 11)), ((4, 12),))
    """
    flat: list[tuple[int, int]] = [(0, 1)]
    row = 1
    for size, dim_ranges in zip(reversed(shape), reversed(ranges), strict=True):
        if flat == [(0, row)]:
            flat = [(first * row, last * row) for first, last in dim_ranges]
        else:
            indices = (index for first, last in dim_ranges for index in range(first, last))
            flat = [(index * row + first, index * row + last) for index in indices for first, last in flat]
        row *= size
    return tuple(flat)


def sliced(shard: Shard, first: int, last: int) -> tuple[Shard, int, int] | None:
    """Returns the record of the slices [first, last) along the first dimension, and which local elements these are.

    None where the elements are no range.
    """
    if not is_range(shard) or not shard.shape:
        return None
    row = math.prod(shard.shape[1:])
    start, stop = max(shard.start, first * row), min(shard.stop, last * row)
    if start >= stop:
        row_start = min(max(first * row, shard.start), shard.stop) - first * row
        row_start = min(max(row_start, 0), (last - first) * row)
        return replace(shard, shape=(last - first, *shard.shape[1:]), start=row_start, stop=row_start), 0, 0
    part = replace(shard, shape=(last - first, *shard.shape[1:]), start=start - first * row, stop=stop - first * row)
    return part, start - shard.start, stop - shard.start


def local_part(full: Tensor, shard: Shard) -> Tensor:
    """Returns this rank's elements of a full tensor that broadcasts to `shard.shape`, in no particular shape."""
    if shard.ranges:
        return elements_of(full.expand(shard.shape), shard.start, shard.stop, shard.ranges)
    if shard.start == shard.stop:
        return full.new_empty(local_shape(shard.shape, 0, 0))
    if not shard.shape:
        return full.expand(())
    # Only the rows that it needs: a full tensor that was broadcast takes no memory.
    row = max(1, math.prod(shard.shape[1:]))
    first, last = shard.start // row, -(-shard.stop // row)
    if full.dim() == len(shard.shape) and full.shape[0] != 1:
        full = full.narrow(0, first, last - first)
    rows = full.expand(last - first, *shard.shape[1:])
    if shard.start == first * row and shard.stop == last * row:
        return rows
    return rows.reshape(-1)[shard.start - first * row : shard.stop - first * row]


def box_of(local: Tensor, shard: Shard, fill: float | bool) -> tuple[Tensor, list[Tensor | None]]:
    """Returns the rows that a rank has elements of, as a tensor of all dimensions, and which indices it has of each.

    Elements of these rows that other ranks have are `fill`. None stands for all indices of a dimension.
    """
    sizes = sizes_of(shard.ranges) or shard.shape
    row = max(1, math.prod(sizes[1:]))
    first, last = shard.start // row, -(-shard.stop // row)
    if shard.start == first * row and shard.stop == last * row:
        box = local.reshape(last - first, *sizes[1:])
    else:
        flat = torch.full(((last - first) * row,), fill, dtype=local.dtype, device=local.device)
        flat[shard.start - first * row : shard.stop - first * row] = local.reshape(-1)
        box = flat.view(last - first, *sizes[1:])
    indices: list[Tensor | None] = []
    for dim, size in enumerate(shard.shape):
        dim_ranges = shard.ranges[dim] if shard.ranges else ((0, size),)
        index = torch.cat([torch.arange(begin, end, device=local.device) for begin, end in dim_ranges])
        if dim == 0:
            index = index[first:last]
        indices.append(None if len(index) == size else index)
    return box, indices
