"""Bucket partition: which elements of a bucket each rank updates. Numbers in, numbers out.

For element-wise optimizers tensors are cut between rows or elements, so that all ranks hold the same amount: torch's
ZeroRedundancyOptimizer and FairScale's OSS give each tensor to one rank, which does all the work where one tensor is
larger than all others together. For optimizers that need full tensors each is given to one rank, the largest first, to
the rank that has least. No rank then holds more than an even share and the largest tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from scale_core.flat.layout import FlatLayout, LayoutEntry, ShardSpan
from scale_core.flat.packing import group_in_buckets


@dataclass(frozen=True)
class BucketPartition:
    """The layout of a bucket's flat buffer, and its division between the ranks."""

    entries: tuple[LayoutEntry, ...]  # each parameter's place in the buffer
    sizes: tuple[int, ...]  # consecutive elements of the buffer that each rank updates, by rank
    spans_by_rank: tuple[tuple[ShardSpan, ...], ...]  # the elements of each parameter among them, by rank
    owners: tuple[int, ...] = ()  # the rank that updates each parameter, where each is given to one

    @cached_property
    def full_numel(self) -> int:
        return sum(self.sizes)

    @cached_property
    def padding(self) -> int:
        """Elements that belong to no parameter."""
        return self.full_numel - sum(entry.numel for entry in self.entries)

    @property
    def is_even(self) -> bool:
        return len(set(self.sizes)) == 1

    def start(self, rank: int) -> int:
        """The first element of a rank's shard."""
        return sum(self.sizes[:rank])


def cut_evenly(
    names: Sequence[str], shapes: Sequence[tuple[int, ...]], world_size: int, *, alignment: int = 1
) -> BucketPartition:
    """Cuts the parameters at rows, where that costs little padding, or else at elements.

    Each begins at a multiple of `alignment` elements, in the buffer as in a rank's shard.

    >>> partition = cut_evenly(["giant", "tiny"], [(1000, 10), (3,)], world_size=2)
    >>> partition.sizes
    (5003, 5003)
    >>> [span.shape for span in partition.spans_by_rank[0]]
    [(500, 10), (3,)]
    """
    layout = FlatLayout.plan(names, shapes, world_size, alignment=alignment)
    spans = tuple(tuple(layout.spans(rank)) for rank in range(world_size))
    return BucketPartition(tuple(layout.entries), (layout.shard_numel,) * world_size, spans)


def assign_whole(
    names: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    owners: Sequence[int],
    world_size: int,
    *,
    alignment: int = 1,
) -> BucketPartition:
    """Gives each parameter in full to its owner; the parameters of one owner stand together.

    Each begins at a multiple of `alignment` elements, in the buffer as in a rank's shard.

    >>> partition = assign_whole(["a", "b", "c"], [(2, 2), (3,), (5,)], owners=[1, 0, 1], world_size=2)
    >>> partition.sizes, [entry.offset for entry in partition.entries]
    ((3, 9), [3, 0, 7])
    """
    numels = [math.prod(shape) for shape in shapes]
    aligned = [-(-numel // alignment) * alignment for numel in numels]
    offsets, position = [0] * len(names), 0
    for rank in range(world_size):
        for index, owner in enumerate(owners):
            if owner == rank:
                offsets[index] = position
                position += aligned[index]
    sizes = tuple(
        sum(n for n, owner in zip(aligned, owners, strict=True) if owner == rank) for rank in range(world_size)
    )
    entries = tuple(
        LayoutEntry(name, shape, max(1, numel), "parameter", offset)
        for name, shape, numel, offset in zip(names, shapes, numels, offsets, strict=True)
    )
    spans = tuple(
        tuple(
            ShardSpan(0, numel, offset - sum(sizes[:rank]), shape)
            if owner == rank
            else ShardSpan(0, 0, 0, (0, *shape[1:]))
            for shape, numel, owner, offset in zip(shapes, numels, owners, offsets, strict=True)
        )
        for rank in range(world_size)
    )
    return BucketPartition(entries, sizes, spans, tuple(owners))


def choose_owners(numels: Sequence[int], world_size: int, loads: Sequence[int] = ()) -> list[int]:
    """Gives full parameters to ranks: the largest first, each to the rank that has least (Graham, 1969).

    A rank ends with at most an even share of all and the largest parameter; of equals the first rank is taken. `loads`
    has the elements that each rank has already. A parameter without elements counts as one, so that it has an owner.

    >>> choose_owners([7, 3, 2, 2], world_size=2)
    [0, 1, 1, 1]
    """
    load_by_rank = list(loads) or [0] * world_size
    owners = [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda index: -numels[index]):
        owners[index] = min(range(world_size), key=lambda rank: load_by_rank[rank])
        load_by_rank[owners[index]] += max(1, numels[index])
    return owners


def group_from_the_end(numels: Sequence[int], bucket_numel: int) -> list[list[int]]:
    """As `group_in_buckets`, begun with the last parameter, so that the smaller one is the first bucket.

    That one is reduced last in a backward pass, and needed first in the next forward pass: nothing hides its way.

    >>> group_from_the_end([4, 4, 4, 20, 1], bucket_numel=10)
    [[0], [1, 2], [3], [4]]
    """
    last = len(numels) - 1
    buckets = group_in_buckets(numels[::-1], bucket_numel)
    return [[last - index for index in reversed(members)] for members in reversed(buckets)]


def group_in_rounds(numels: Sequence[int], owners: Sequence[int], bucket_numel: int) -> list[list[int]]:
    """Puts parameters together so that in each round every owner has its own to do, up to a bucket full.

    An owner's parameters are taken in order; a larger one has a round of its own there.

    >>> group_in_rounds([4, 4, 4, 20, 1], owners=[0, 1, 0, 1, 0], bucket_numel=8)
    [[0, 1, 2], [3, 4]]
    """
    rounds: list[list[int]] = []
    for owner in sorted(set(owners)):
        owned = [index for index, its_owner in enumerate(owners) if its_owner == owner]
        for number, run in enumerate(group_in_buckets([numels[index] for index in owned], bucket_numel)):
            if number == len(rounds):
                rounds.append([])
            rounds[number] += [owned[index] for index in run]
    return [sorted(members) for members in rounds]
