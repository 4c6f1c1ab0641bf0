"""The placement of atoms in even shards: integers in, integers out.

A parameter is contiguous, so padding is between parameters and at the end only. One with atoms of a elements at
offset o that crosses the cut r·S needs a | r·S - o, and a | S as well where it crosses a second cut. Parameters are
placed one after another, longest atom first; before one that would be cut inside an atom, a gap of fewer than a
elements is left, which later parameters fill where they fit. Each cut costs one gap at most, hence the bound. With W
ranks and N elements in all, and counting no atom as longer than its parameter:

    A   the longest atom                            P   the longest parameter that is one single atom, 0 if none
    M   the longest parameter                       g   ALIGN from ALIGN_FROM·W elements on, 1 below
    L   the least common multiple of g and the atoms of the divisible parameters longer than an even shard ⌈N/W⌉

    padding <= min(max((W-1)·A, W·P - N) + W·(L-1),      parameters may run over several cuts
                   max((W-1)·A, W·M - N) + W·(g-1))      no parameter is longer than a shard

and no padding at all where W is 1. veScale-FSDP (arXiv 2602.22437) plans the same problem.

With an alignment of k elements, every parameter starts at a multiple of k in the buffer, and every piece of one at a
multiple of k in its shard. Then all of the above counts in units of k elements: a parameter of n elements is ⌈n/k⌉
units long, an atom of a elements lcm(a, k)/k units. That adds fewer than k elements of padding per parameter.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

ALIGN = 8
"""Shards of large plans are multiples of this many elements: 16 bytes of bf16, which matrix kernels and NCCL want."""

ALIGN_FROM = 1000 * ALIGN
"""Elements per rank from which shards are aligned: less than 0.1 % of padding."""

TRIES = 4
"""Shard sizes that are tried per step size, before the size that is known to fit is taken."""


class Piece(NamedTuple):
    """All that the arithmetic needs to know of a parameter."""

    numel: int
    atom: int  # The elements that stay together: from 1 to the parameter's own, or 1 where it has none

    @property
    def divisible(self) -> bool:
        """Whether it may be cut anywhere."""
        return self.numel > self.atom


def pack(pieces: Sequence[Piece], world_size: int, alignment: int = 1) -> tuple[int, list[int]]:
    """Returns the smallest shard size found, or one that is known to fit, and each piece's offset.

    All of them are multiples of `alignment`, in elements.

    >>> pack([Piece(6, 3), Piece(5, 1)], world_size=2), pack([Piece(6, 3), Piece(5, 1)], world_size=2, alignment=4)
    ((6, [0, 6]), (8, [0, 8]))
    """
    is_large = world_size > 1 and sum(piece.numel for piece in pieces) >= ALIGN_FROM * world_size
    units = [_in_units(piece, alignment) for piece in pieces]
    size, offsets = _pack_units(units, world_size, max(1, ALIGN // alignment) if is_large else 1)
    return size * alignment, [offset * alignment for offset in offsets]


def _in_units(piece: Piece, alignment: int) -> Piece:
    """A piece whose lengths are counted in units of `alignment` elements."""
    numel = -(-piece.numel // alignment)
    atom = math.lcm(piece.atom, alignment) // alignment if piece.divisible else numel
    return Piece(numel, max(1, min(atom, numel)))


def _pack_units(pieces: Sequence[Piece], world_size: int, align: int) -> tuple[int, list[int]]:
    total = sum(piece.numel for piece in pieces)
    least = max([-(-total // world_size), *(piece.numel for piece in pieces if not piece.divisible)])
    crossing = {piece.atom for piece in pieces if piece.divisible and piece.numel > -(-total // world_size)}
    sure = _sure_size(pieces, world_size, align, math.lcm(align, *crossing))
    best, placed = sure, _offsets(pieces, sure)[1]
    # A multiple of the atoms that run over several shards, and one of all atoms, need the fewest gaps.
    for step in sorted({align, math.lcm(align, *crossing), _capped_lcm(align, pieces, total)}):
        size = _round_up(least, step)
        for _ in range(TRIES):
            if size >= best:
                break
            end, offsets = _offsets(pieces, size)
            if end is not None and end <= size * world_size:
                best, placed = size, offsets
                break
            short = 1 if end is None else end - size * world_size
            size += _round_up(-(-short // world_size), step)
    return best, placed


def _sure_size(pieces: Sequence[Piece], world_size: int, align: int, common: int) -> int:
    """A shard size that holds every plan of these pieces: the bound of the module's docstring, per rank."""
    total = sum(piece.numel for piece in pieces)
    longest_atom = max((piece.atom for piece in pieces), default=1)
    with_gaps = -(-(total + (world_size - 1) * (longest_atom - 1)) // world_size)
    longest_whole = max((piece.numel for piece in pieces if not piece.divisible), default=0)
    longest = max((piece.numel for piece in pieces), default=0)
    return min(_round_up(max(with_gaps, longest_whole), common), _round_up(max(with_gaps, longest), align))


def _offsets(pieces: Sequence[Piece], size: int) -> tuple[int | None, list[int]]:
    """Places the pieces in order; returns the end of the last (None: `size` can't hold them) and all offsets."""
    offsets = [-1] * len(pieces)
    waiting: list[tuple[int, int]] | None = None
    cursor = 0
    for i, (numel, atom) in enumerate(pieces):
        if offsets[i] >= 0:
            continue
        cut = (cursor // size + 1) * size if size else 0
        if cursor + numel > cut:
            gap = (cut - cursor) % atom
            if size % atom and cursor + gap + numel > cut + size:
                return None, offsets
            if gap:
                if waiting is None:
                    waiting = sorted((piece.numel, j) for j, piece in enumerate(pieces))
                _fill(waiting, offsets, cursor, gap)
            cursor += gap
        offsets[i] = cursor
        cursor += numel
    return cursor, offsets


def _fill(waiting: list[tuple[int, int]], offsets: list[int], cursor: int, gap: int) -> None:
    """Places waiting pieces in a gap, the longest that fits first; `waiting` is sorted by size."""
    # The piece behind the gap is longer than the gap, so it is never placed there itself.
    while gap and (fitting := bisect_right(waiting, gap, key=lambda entry: entry[0])):
        numel, i = waiting.pop(fitting - 1)
        if offsets[i] < 0:  # those placed before this gap are still listed
            offsets[i] = cursor
            cursor, gap = cursor + numel, gap - numel


def _capped_lcm(align: int, pieces: Sequence[Piece], most: int) -> int:
    """The least common multiple of `align` and all atoms, or `align` alone where it is larger than `most`."""
    common = align
    for atom in {piece.atom for piece in pieces if piece.divisible}:
        common = math.lcm(common, atom)
        if common > most:
            return align
    return common


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def group_in_buckets(numels: Sequence[int], bucket_numel: int) -> list[list[int]]:
    """Puts neighboring parameters together until a bucket is full; a larger one has a bucket of its own.

    >>> group_in_buckets([4, 4, 4, 20, 1], bucket_numel=10)
    [[0, 1], [2], [3], [4]]
    """
    buckets: list[list[int]] = []
    numel_in_bucket = 0
    for index, numel in enumerate(numels):
        if not buckets or numel_in_bucket + numel > bucket_numel:
            buckets.append([])
            numel_in_bucket = 0
        buckets[-1].append(index)
        numel_in_bucket += numel
    return buckets
