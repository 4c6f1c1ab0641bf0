"""Chunks of a sequence that are multiplied while others are being sent.

Each rank has a part of the sequence, and each part is cut into pieces. In round r, each rank sends its r-th piece to
all others; or it sends each of them a summand of their r-th piece. All rounds are started as early as possible, and
chunks that need no other rank are multiplied in the meantime. A step reads: start the transfers, multiply, wait.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import all_gather
from scale_core.comm.group import Group
from scale_tp.comm import PendingTensor, call_tag, sum_in_rank_order
from scale_tp.split import even_sizes


class ChunkRange(NamedTuple):
    """Some positions of a sequence."""

    start: int
    length: int


class SequenceChunks(NamedTuple):
    """How a sequence is cut into the ranks' parts, and these into pieces; some are empty where a part is shorter."""

    group: Group
    dim: int  # of the sequence, counted from the first
    sizes: tuple[int, ...]  # positions of each rank
    pieces: int

    @property
    def own(self) -> ChunkRange:
        """This rank's shard, in the full sequence."""
        rank = self.group.rank
        return ChunkRange(sum(self.sizes[:rank]), self.sizes[rank])

    def at(self, tensor: Tensor, chunk: ChunkRange) -> Tensor:
        """Some positions of a tensor: a view."""
        return tensor.narrow(self.dim, chunk.start, chunk.length)

    def shape(self, like: tuple[int, ...], length: int, features: int | None = None) -> tuple[int, ...]:
        """Returns a shape with this number of positions, and optionally a different last dimension."""
        shape = (*like[: self.dim], length, *like[self.dim + 1 :])
        return shape if features is None else (*shape[:-1], features)

    def row_numel(self, like: Tensor) -> int:
        """How many elements one position has."""
        return torch.Size(self.shape(tuple(like.shape), 1)).numel()


@functools.lru_cache(maxsize=4096)
def chunk_ranges(sizes: tuple[int, ...], pieces: int, turn: int) -> tuple[ChunkRange, ...]:
    """Returns where each rank's piece of a round is in the full sequence.

    Example:
        >>> [[tuple(chunk) for chunk in chunk_ranges((5, 2), 2, turn)] for turn in range(2)]
        [[(0, 3), (5, 1)], [(3, 2), (6, 1)]]
    """
    ranges, first = [], 0
    for size in sizes:
        lengths = even_sizes(size, pieces)
        ranges.append(ChunkRange(first + sum(lengths[:turn]), lengths[turn]))
        first += size
    return tuple(ranges)


def all_gather_chunks(chunks: SequenceChunks, part: Tensor, act: Callable[[ChunkRange, Tensor], None]) -> None:
    """Calls act(range in the full sequence, [..., positions, ...]) for all of it: this rank's part first."""
    rounds = [_start_gather(chunks, part, turn) for turn in range(chunks.pieces)] if chunks.group.size > 1 else []
    if chunks.own.length:
        act(chunks.own, part)  # While the others' pieces are being sent.
    for turn, pending in enumerate(rounds):
        for chunk, piece in _received_pieces(chunks, part, turn, pending):
            act(chunk, piece)


def reduce_scatter_chunks(chunks: SequenceChunks, like: Tensor, act: Callable[[ChunkRange, Tensor], None]) -> Tensor:
    """Returns this rank's shard [..., positions, ...] of the sum of all ranks' results, piece by piece.

    act(range in the full sequence, [..., positions, ...]) fills the latter with this rank's summand. Summands, which
    have the dtype of `like` and its shape but for the positions, are added in rank order, in fp32 at least.
    """
    group, shape = chunks.group, tuple(like.shape)
    rounds = [_start_scatter(chunks, like, turn, act) for turn in range(chunks.pieces)] if group.size > 1 else []
    output = like.new_empty(chunks.shape(shape, chunks.own.length))
    if chunks.own.length:
        act(chunks.own, output)  # While the summands are being sent.
    for turn, pending in enumerate(rounds):
        received, chunk = pending.wait(), chunk_ranges(chunks.sizes, chunks.pieces, turn)[group.rank]
        target = chunks.at(output, ChunkRange(chunk.start - chunks.own.start, chunk.length))
        others = list(received.view(group.size - 1, *target.shape))
        target.copy_(sum_in_rank_order([*others[: group.rank], target, *others[group.rank :]]))
    return output


def _start_gather(chunks: SequenceChunks, part: Tensor, turn: int) -> PendingTensor:
    group, row = chunks.group, chunks.row_numel(part)
    ranges = chunk_ranges(chunks.sizes, chunks.pieces, turn)
    numels = [chunk.length * row for chunk in ranges]
    local_range = ranges[group.rank]
    piece = chunks.at(part, ChunkRange(local_range.start - chunks.own.start, local_range.length)).reshape(-1)
    tag = call_tag("piece to all", turn, chunks.dim, chunks.sizes, part.dtype, chunks.shape(tuple(part.shape), 0))
    uneven = numels if len(set(numels)) > 1 else None
    work = all_gather(part.new_empty(sum(numels)), piece.contiguous(), group, sizes=uneven, tag=tag)
    return PendingTensor("a gathering of pieces", part, group, work)


def _received_pieces(
    chunks: SequenceChunks, part: Tensor, turn: int, pending: PendingTensor
) -> Iterator[tuple[ChunkRange, Tensor]]:
    """The others' pieces of a round."""
    ranges = chunk_ranges(chunks.sizes, chunks.pieces, turn)
    pieces = pending.wait().split([chunk.length * chunks.row_numel(part) for chunk in ranges])
    for rank, (chunk, flat) in enumerate(zip(ranges, pieces, strict=True)):
        if rank != chunks.group.rank and chunk.length:
            yield chunk, flat.view(chunks.shape(tuple(part.shape), chunk.length))


def _start_scatter(
    chunks: SequenceChunks, like: Tensor, turn: int, act: Callable[[ChunkRange, Tensor], None]
) -> PendingTensor:
    group, row, shape = chunks.group, chunks.row_numel(like), tuple(like.shape)
    ranges = chunk_ranges(chunks.sizes, chunks.pieces, turn)
    sent_sizes = [0 if rank == group.rank else chunk.length * row for rank, chunk in enumerate(ranges)]
    received_sizes = [0 if rank == group.rank else ranges[group.rank].length * row for rank in range(group.size)]
    sent, received = like.new_empty(sum(sent_sizes)), like.new_empty(sum(received_sizes))
    for rank, (chunk, flat) in enumerate(zip(ranges, sent.split(sent_sizes), strict=True)):
        if rank != group.rank and chunk.length:
            act(chunk, flat.view(chunks.shape(shape, chunk.length)))
    tag = call_tag("summand of a piece", turn, chunks.dim, chunks.sizes, like.dtype, chunks.shape(shape, 0))
    work = all_to_all(received, sent, group, output_sizes=received_sizes, input_sizes=sent_sizes, tag=tag)
    return PendingTensor("a sum of pieces", like, group, work)


def to_rows(tensor: Tensor) -> Tensor:
    """[..., features] as [rows, features]."""
    return tensor.reshape(-1, tensor.shape[-1]) if tensor.shape[-1] else tensor.new_empty(tensor.shape[:-1].numel(), 0)


def matmul_into(rows: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Fills `out` [..., outputs] with [rows, features] times [features, outputs], and a bias."""
    into = out.view(rows.shape[0], factor.shape[1]) if out.is_contiguous() else None
    product = torch.mm(rows, factor, out=into) if bias is None else torch.addmm(bias, rows, factor, out=into)
    if into is None:
        out.copy_(product.view(out.shape))


def product_dtype(input: Tensor, weights: Sequence[Tensor]) -> torch.dtype:
    """The dtype of a matrix product: the dtype of all factors, or of autocast; `ValueError` where factors differ."""
    kind = input.device.type
    if torch.is_autocast_enabled(kind) and input.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    for weight in weights:
        if weight.dtype != input.dtype:
            raise ValueError(f"expected a weight of the input's dtype, {input.dtype}, got {weight.dtype}: call .to()")
    return input.dtype


def without_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Turns autocast off: the factors have their dtype already."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
