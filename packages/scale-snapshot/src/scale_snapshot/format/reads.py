"""Reads parts of saved chunks straight into the tensors that they are for.

Where elements stand one after the other in the file and in memory, the system puts them there, and neighbors in one
call. Where they don't (columns, strides, another dtype, another device), a few rows at a time pass through a small
buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from scale_core.sharded_tensor.chunks import Chunk
from scale_snapshot.format.checksums import union_of
from scale_snapshot.format.safetensors_io import memory_of
from scale_snapshot.format.stored_file import StoredFile, opened

_STAGED_BYTES = 256 << 10


@dataclass(frozen=True)
class Read:
    """A part of a saved chunk, and the tensor that it is read into."""

    file: str
    begin: int  # The byte at which the saved chunk begins
    sizes: tuple[int, ...]  # Of the saved chunk
    part: Chunk  # Which of its elements
    dtype: torch.dtype  # In the file
    into: Tensor  # Of the part's sizes, with any strides, dtype and device

    @cached_property
    def span(self) -> tuple[int, int]:
        """The bytes of the file from the first to the last element."""
        first = last = 0
        for size, offset, length in zip(self.sizes, self.part.offsets, self.part.sizes, strict=True):
            first, last = first * size + offset, last * size + offset + length - 1
        return self.begin + first * self.dtype.itemsize, self.begin + (last + 1) * self.dtype.itemsize

    @cached_property
    def is_direct(self) -> bool:
        """Whether it is one range of the file and one of this process's memory, equal to the byte."""
        begin, end = self.span
        return (
            end - begin == self.into.nbytes
            and self.into.dtype == self.dtype
            and self.into.device.type == "cpu"
            and self.into.is_contiguous()
            and not (self.into.is_conj() or self.into.is_neg())
        )

    def pieces(self) -> Iterator[Read]:
        """Cuts it until each piece is direct, or small."""
        begin, end = self.span
        if self.is_direct or end - begin <= _STAGED_BYTES:
            yield self
            return
        row_bytes = math.prod(self.sizes[1:]) * self.dtype.itemsize
        offset, length = self.part.offsets[0], self.part.sizes[0]
        if length == 1:  # One row: its columns.
            inner = Chunk(self.part.offsets[1:], self.part.sizes[1:])
            yield from replace(
                self, begin=self.begin + offset * row_bytes, sizes=self.sizes[1:], part=inner, into=self.into[0]
            ).pieces()
            return
        count = max(1, _STAGED_BYTES // row_bytes)
        for first in range(0, length, count):
            rows = min(count, length - first)
            part = Chunk((offset + first, *self.part.offsets[1:]), (rows, *self.part.sizes[1:]))
            yield from replace(self, part=part, into=self.into[first : first + rows]).pieces()


def blocks_of(reads: Iterable[Read], block_bytes: int) -> dict[str, list[tuple[int, int]]]:
    """The blocks of each file in which the reads are, as ranges `[first, last)` in order."""
    blocks: dict[str, list[tuple[int, int]]] = {}
    for read in reads:
        begin, end = read.span
        blocks.setdefault(read.file, []).append((begin // block_bytes, -(-end // block_bytes)))
    return {name: union_of(blocks[name]) for name in sorted(blocks)}


def read_tensors(path: Path, reads: Iterable[Read], progress: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Reads all parts; each file is opened once, and read from its beginning to its end.

    Args:
        path: The directory.
        reads: The parts.
        progress: Called with the number of bytes that were read since the last call.
    """
    ordered = sorted(reads, key=lambda read: (read.file, read.span))
    for name, of_file in itertools.groupby(ordered, key=lambda read: read.file):
        with opened(path / name, progress) as file:
            _read_file(file, [piece for read in of_file for piece in read.pieces()])


def _read_file(file: StoredFile, pieces: list[Read]) -> None:
    neighbors: list[Read] = []
    for piece in pieces:
        if neighbors and not (piece.is_direct and neighbors[-1].span[1] == piece.span[0]):
            _read_direct(file, neighbors)
            neighbors = []
        if piece.is_direct:
            neighbors.append(piece)
        else:
            _read_staged(file, piece)
    _read_direct(file, neighbors)
    for piece in pieces:
        if not piece.into.is_inference():  # Written behind autograd's back, which has to know that it was.
            torch.autograd.graph.increment_version(piece.into)


def _read_direct(file: StoredFile, neighbors: list[Read]) -> None:
    if neighbors:
        file.read_into([memory_of(read.into) for read in neighbors], neighbors[0].span[0])


def _read_staged(file: StoredFile, piece: Read) -> None:
    begin, end = piece.span
    staged = torch.empty((end - begin) // piece.dtype.itemsize, dtype=piece.dtype)
    file.read_into([memory_of(staged)], begin)
    strides = [math.prod(piece.sizes[dim + 1 :]) for dim in range(len(piece.sizes))]
    piece.into.copy_(staged.as_strided(piece.part.sizes, strides))
