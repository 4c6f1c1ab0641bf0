"""The elements that a rank holds, as the boxes that files and other world sizes speak of.

A rank holds the elements `[start, stop)` of a tensor in row-major order. Where the cut runs inside a row that is no
box, but a few of them: `boxes` says which, and `LocalShard` says it to the planner of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Box(NamedTuple):
    """An axis-aligned box of a tensor: where it begins and how long it is, along each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def boxes(shape: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cuts the elements `[start, stop)` of a row-major tensor into the fewest boxes, in order.

    Each box is contiguous, and the boxes one after the other are the range: at most 2·ndim - 1 of them.

    Raises:
        ValueError: The range does not lie within the tensor.

    Example:
        >>> for box in boxes((4, 3), 2, 10):
        ...     print(box.offsets, box.sizes)
        (0, 2) (1, 1)
        (1, 0) (2, 3)
        (3, 0) (1, 1)
    """
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"expected a range within the {math.prod(shape)} elements of {tuple(shape)}, got [{start}, {stop})"
        )
    return [] if start == stop else list(_boxes(tuple(shape), start, stop, ()))


def _boxes(shape: tuple[int, ...], start: int, stop: int, fixed: tuple[int, ...]) -> Iterator[Box]:
    """The boxes of a non-empty range of the sub-tensor whose leading indices are `fixed`."""
    ones = (1,) * len(fixed)
    if not shape:
        yield Box(fixed, ones)
        return
    row = math.prod(shape[1:])
    first_whole, end_whole = -(-start // row), stop // row
    if first_whole > end_whole:  # within one row
        index = start // row
        yield from _boxes(shape[1:], start - index * row, stop - index * row, (*fixed, index))
        return
    if start < first_whole * row:
        yield from _boxes(shape[1:], start - (first_whole - 1) * row, row, (*fixed, first_whole - 1))
    if first_whole < end_whole:
        rest = shape[1:]
        yield Box((*fixed, first_whole, *(0 for _ in rest)), (*ones, end_whole - first_whole, *rest))
    if end_whole * row < stop:
        yield from _boxes(shape[1:], 0, stop - end_whole * row, (*fixed, end_whole))


@dataclass
class LocalShard:
    """The elements `[start, stop)` of a tensor of `shape`, as this rank holds them.

    It speaks the protocol of torch's checkpoint planner; unlike a DTensor, it may consist of several boxes.

    Attributes:
        tensor: The elements, contiguous, `stop - start` of them, of any shape.
        shape: The shape of the whole tensor.
        start: The first element held, in row-major order.
        stop: One past the last element held.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.tensor.numel() != self.stop - self.start or not self.tensor.is_contiguous():
            raise ValueError(
                f"expected a contiguous tensor of {self.stop - self.start} elements for [{self.start}, {self.stop}), "
                f"got shape {tuple(self.tensor.shape)} with strides {self.tensor.stride()}: pass tensor.contiguous()"
            )

    def size(self) -> torch.Size:
        """The shape of the whole tensor: what the planner compares with the checkpoint's."""
        return torch.Size(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def pieces(self) -> dict[Box, Tensor]:
        """Each box of the range with its elements: views of `tensor`, each of the box's sizes."""
        if math.prod(self.shape) == 0:  # Nothing is held, but the tensor is there, and must be written by someone.
            return {Box((0,) * len(self.shape), self.shape): self.tensor.view(self.shape)}
        flat, position, found = self.tensor.detach().view(-1), 0, {}
        for box in boxes(self.shape, self.start, self.stop):
            length = math.prod(box.sizes)
            found[box] = flat[position : position + length].view(box.sizes)
            position += length
        return found

    def __create_write_items__(self, fqn: str, _object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(box.offsets), sizes=torch.Size(box.sizes)) for box in self.pieces
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for box, piece in self.pieces.items():
            if index.offset is not None and tuple(index.offset) == box.offsets:
                return piece
        raise ValueError(f"{index.fqn}: this rank holds [{self.start}, {self.stop}), no box at {index.offset}")
