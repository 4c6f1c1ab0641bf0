"""A rank's elements as chunks, axis-aligned boxes, for files and other world sizes. Pure arithmetic.

A rank holds the elements `[start, stop)` of a tensor in row-major order, or of some of its indices. Where the cut runs
inside a row, the elements are several chunks: `chunks_of` says which, `cut_in_chunks` gives each its elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from scale_core.shard import Ranges


class Chunk(NamedTuple):
    """An axis-aligned box of a tensor: where it begins and how long it is, along each dimension.

    Examples:
        >>> from scale_core.state.state_dict import Chunk
        >>> Chunk((2, 0), (2, 3))  # rows 2 and 3 of a matrix with 3 columns
        Chunk(offsets=(2, 0), sizes=(2, 3))

    See also: [the guide to sharded parameters](../guides/sharded-parameters.md).
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def intersection(self, other: Chunk) -> Chunk | None:
        """The elements that are in both; None if there are none."""
        ranges = [(max(a, b), min(a + m, b + n)) for a, m, b, n in zip(*self, *other, strict=True)]
        if any(begin >= end for begin, end in ranges):
            return None
        return Chunk(tuple(begin for begin, _ in ranges), tuple(end - begin for begin, end in ranges))

    def relative_to(self, outer: Chunk) -> Chunk:
        """The same elements, counted from where the outer chunk begins."""
        return Chunk(tuple(map(operator.sub, self.offsets, outer.offsets)), self.sizes)

    def view_of(self, tensor: Tensor) -> Tensor:
        """Its elements of a tensor, as a view."""
        for dim, (offset, size) in enumerate(zip(*self, strict=True)):
            tensor = tensor.narrow(dim, offset, size)
        return tensor


def chunks_of(shape: Sequence[int], start: int, stop: int) -> list[Chunk]:
    """Cuts the elements `[start, stop)` of a row-major tensor into the fewest chunks, in order.

    Each chunk is contiguous, and the chunks one after the other are the range: at most 2·ndim - 1 of them.

    Raises:
        ValueError: The range does not lie within the tensor.

    Example:
        >>> for chunk in chunks_of((4, 3), 2, 10):
        ...     print(chunk.offsets, chunk.sizes)
        (0, 2) (1, 1)
        (1, 0) (2, 3)
        (3, 0) (1, 1)
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"expected a range within the {math.prod(shape)} elements of {tuple(shape)}, got [{start}, {stop})"
        )
    return [] if start == stop else list(_chunks(tuple(shape), start, stop, ()))


def _chunks(shape: tuple[int, ...], start: int, stop: int, fixed: tuple[int, ...]) -> Iterator[Chunk]:
    """The chunks of a non-empty range of the sub-tensor whose leading indices are `fixed`."""
    ones = (1,) * len(fixed)
    if not shape:
        yield Chunk(fixed, ones)
        return
    row = math.prod(shape[1:])
    first_full_row, end_full_row = -(-start // row), stop // row
    if first_full_row > end_full_row:  # within one row
        index = start // row
        yield from _chunks(shape[1:], start - index * row, stop - index * row, (*fixed, index))
        return
    if start < first_full_row * row:
        yield from _chunks(shape[1:], start - (first_full_row - 1) * row, row, (*fixed, first_full_row - 1))
    if first_full_row < end_full_row:
        inner_shape = shape[1:]
        yield Chunk(
            (*fixed, first_full_row, *(0 for _ in inner_shape)), (*ones, end_full_row - first_full_row, *inner_shape)
        )
    if end_full_row * row < stop:
        yield from _chunks(shape[1:], 0, stop - end_full_row * row, (*fixed, end_full_row))


def sizes_of(ranges: Ranges) -> tuple[int, ...]:
    """The number of indices that are taken of each dimension."""
    return tuple(sum(last - first for first, last in dim_ranges) for dim_ranges in ranges)


def _to_chunks(chunk: Chunk, piece: Tensor, ranges: Ranges) -> dict[Chunk, Tensor]:
    """Cuts a chunk of the `ranges` into chunks of the full tensor, each with its elements: views of `piece`."""
    chunks = {chunk: piece}
    for dim, dim_ranges in enumerate(ranges):
        cut: dict[Chunk, Tensor] = {}
        for part, elements in chunks.items():
            before = 0
            for first, last in dim_ranges:
                begin = max(part.offsets[dim], before)
                end = min(part.offsets[dim] + part.sizes[dim], before + last - first)
                if begin < end:
                    offsets = (*part.offsets[:dim], first + begin - before, *part.offsets[dim + 1 :])
                    sizes = (*part.sizes[:dim], end - begin, *part.sizes[dim + 1 :])
                    cut[Chunk(offsets, sizes)] = elements.narrow(dim, begin - part.offsets[dim], end - begin)
                before += last - first
        chunks = cut
    return chunks


def cut_in_chunks(
    piece: Tensor, shape: Sequence[int], start: int, stop: int, ranges: Ranges = ()
) -> dict[Chunk, Tensor]:
    """Returns each chunk of the elements `[start, stop)`, of a tensor of `shape` or of its `ranges`, with its elements.

    These are views of `piece`, in the chunk's sizes. It is contiguous, or has the shape of all of these indices.
    """
    shape = tuple(shape)
    if math.prod(shape) == 0:  # It has no elements, but someone must write that the tensor is there.
        return {Chunk((0,) * len(shape), shape): piece.view(shape)}
    sizes = sizes_of(ranges) if ranges else shape
    if tuple(piece.shape) == sizes:  # Its strides may be any.
        return _to_chunks(Chunk((0,) * len(sizes), sizes), piece, ranges)
    flat, position, chunks = piece.view(-1), 0, {}
    for chunk in chunks_of(sizes, start, stop):
        length = math.prod(chunk.sizes)
        chunks.update(_to_chunks(chunk, flat[position : position + length].view(chunk.sizes), ranges))
        position += length
    return chunks
