"""How the indices of one dimension are divided between the ranks: arithmetic on integers.

A `Split` has the rows, columns, heads or words of all ranks. So layers need no special case for a size that does not
divide, and two successive layers can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from scale_core.arguments import checked_arguments

Range: TypeAlias = tuple[int, int]
"""Indices from the first to one past the last."""


@dataclass(frozen=True)
class Split:
    """Which indices of a dimension each rank has.

    Two splits are equal if every rank has the same indices in the same order.

    Attributes:
        total: How many indices the full dimension has.
        ranges: For each rank the ranges that it has, in the order of its part. Mostly one; a
            matrix that is several, stacked and split each by itself, has one for each of these. Several ranks may have
            the same ranges: those are copies.

    Example:
        >>> Split.even(7, 3)
        Split(total=7, ranges=(((0, 3),), ((3, 5),), ((5, 7),)))

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    total: int
    ranges: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        for rank, ranges in enumerate(self.ranges):
            for start, stop in ranges:
                if not 0 <= start <= stop <= self.total:
                    raise ValueError(
                        f"expected ranges within {self.total} indices, got [{start}, {stop}) for rank {rank}"
                    )
        sorted_ranges = sorted({range_ for ranges in self.ranges for range_ in ranges if range_[0] < range_[1]})
        reached = 0
        for start, stop in sorted_ranges:
            if start > reached:
                break
            if start < reached:
                raise ValueError(
                    f"expected ranges of several ranks to be the same or to have nothing in common, got [{start}, "
                    f"{stop}) beside others that reach to {reached}"
                )
            reached = stop
        if reached != self.total:
            raise ValueError(
                f"expected that each of {self.total} indices is some rank's, but index {reached} is none's"
            )

    @classmethod
    def even(cls, total: int, num_ranks: int, *, block: int = 1) -> Split:
        """As even as possible: the first ranks have one block more where blocks don't divide.

        Args:
            total: How many indices there are.
            num_ranks: Between how many ranks they are divided; some have none where there are more ranks than blocks.
            block: The number of indices that always stay together, for example the features of an attention head.

        Raises:
            ValueError: A negative size, no rank, or a total that is not a multiple of the block.
        """
        if block < 1 or total % block:
            raise ValueError(
                f"expected {total} indices to be whole blocks of {block}: {total % max(block, 1)} are left"
            )
        return cls.of_sizes([block * size for size in even_sizes(total // block, num_ranks)])

    @classmethod
    def of_sizes(cls, sizes: Sequence[int]) -> Split:
        """One range for each rank, of these lengths, in rank order.

        Raises:
            ValueError: A size is negative.
        """
        if any(size < 0 for size in sizes):
            raise ValueError(f"expected sizes of 0 and more, got {list(sizes)}")
        cuts = [0, *itertools.accumulate(sizes)]
        return cls(cuts[-1], tuple((pair,) for pair in itertools.pairwise(cuts)))

    @classmethod
    def stacked(cls, *splits: Split) -> Split:
        """Several matrices one behind the other in one dimension, each split by itself.

        For example the queries, keys and values of a fused projection, or the gate and the up projection of a
        perceptron.

        Raises:
            ValueError: They are for different numbers of ranks, or there are none.

        Example:
            >>> Split.stacked(Split.even(4, 2), Split.even(2, 2))
            Split(total=6, ranges=(((0, 2), (4, 5)), ((2, 4), (5, 6))))
        """
        if len({split.num_ranks for split in splits}) != 1:
            raise ValueError(
                f"expected splits for one number of ranks, got {[split.num_ranks for split in splits]}: make all "
                "with the same num_ranks"
            )
        offsets = [0, *itertools.accumulate(split.total for split in splits)]
        ranges = tuple(
            tuple(
                (start + offset, stop + offset)
                for offset, split in zip(offsets, splits, strict=False)
                for start, stop in split.ranges[rank]
            )
            for rank in range(splits[0].num_ranks)
        )
        return cls(offsets[-1], ranges)

    @classmethod
    def strided(cls, total: int, num_ranks: int, stride: int) -> Split:
        """FairScale's `stride`: the number of stacked matrices of equal size, each of which is split by itself.

        Raises:
            ValueError: The total is not made of `stride` equal things.
        """
        if stride < 1 or total % stride:
            raise ValueError(
                f"expected stride to divide the {total} indices that are split, got stride={stride}: "
                "it is the number of equal matrices that are stacked in this one"
            )
        return (
            cls.stacked(*[cls.even(total // stride, num_ranks)] * stride) if stride > 1 else cls.even(total, num_ranks)
        )

    @property
    def num_ranks(self) -> int:
        """Between how many ranks the indices are divided."""
        return len(self.ranges)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many indices each rank has."""
        return tuple(sum(stop - start for start, stop in ranges) for ranges in self.ranges)

    @cached_property
    def is_in_rank_order(self) -> bool:
        """Whether the parts of all ranks, one behind the other, are the full dimension."""
        local_ranges = [range_ for ranges in self.ranges for range_ in ranges if range_[0] < range_[1]]
        return local_ranges == sorted(local_ranges) and sum(self.sizes) == self.total

    @cached_property
    def has_copies(self) -> bool:
        """Whether some ranks have the same indices."""
        return any(not self.is_first_copy(rank) and self.sizes[rank] for rank in range(self.num_ranks))

    @property
    def has_only_full_copies(self) -> bool:
        """Whether ranks that have some of the same indices have all of them in common, so that they hold copies."""
        return sum(size for rank, size in enumerate(self.sizes) if self.is_first_copy(rank)) == self.total

    def is_first_copy(self, rank: int) -> bool:
        """Whether no rank before this one has the same indices: of copies, only one counts."""
        return self.ranges[rank] not in self.ranges[:rank]

    def take(self, whole: Tensor, rank: int, dim: int = 0) -> Tensor:
        """Returns a rank's shard of a tensor whose dimension `dim` has all indices; a view where it is one range."""
        parts = [whole.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Returns the full tensor that these parts, by rank, are taken from; of copies, the first counts."""
        pieces: dict[Range, Tensor] = {}
        for ranges, part in zip(self.ranges, parts, strict=True):
            lengths = [stop - start for start, stop in ranges]
            for range_, piece in zip(ranges, part.split(lengths, dim), strict=True):
                pieces.setdefault(range_, piece)
        return torch.cat([pieces[range_] for range_ in sorted(pieces)], dim)


class HeadSplit(NamedTuple):
    """Which attention heads each rank computes.

        >>> from scale_tp.split import split_heads
        >>> heads = split_heads(6, 2, 4)  # 6 query heads and 2 of keys and values, on 4 ranks
        >>> heads.query.sizes
        (2, 1, 2, 1)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    query: Split
    key_value: Split  # those that the queries attend to; several ranks may have copies of one


def even_sizes(total: int, num_ranks: int) -> tuple[int, ...]:
    """How many of `total` indices each rank has: sizes that differ by one at most, the larger ones first.

    Example:
        >>> even_sizes(7, 3)
        (3, 2, 2)
    """
    if total < 0 or num_ranks < 1:
        raise ValueError(f"expected 0 things or more and at least one rank, got {total} things and {num_ranks} ranks")
    quotient, more = divmod(total, num_ranks)
    return tuple(quotient + (rank < more) for rank in range(num_ranks))


@checked_arguments
def split_heads(num_heads: int, num_key_value_heads: int, num_ranks: int) -> HeadSplit:
    """Divides attention heads between the ranks, query heads together with the key-value head that they share.

    If there are at least as many key-value heads as ranks, ranks divide them, and the query heads follow. If there are
    fewer, each is copied to some ranks, which divide its query heads. So a rank holds at most one key-value head, or
    none where it has no query heads.

    Args:
        num_heads: Query heads; the first `num_heads / num_key_value_heads` of them share the first key-value head.
        num_key_value_heads: For plain attention this is `num_heads`, for multi-query attention 1.
        num_ranks: Between how many ranks they are divided.

    Raises:
        ValueError: The query heads don't divide by the key-value heads, or there are none.

    Example:
        >>> query, key_value = split_heads(6, 2, 4)
        >>> query.sizes, key_value.ranges
        ((2, 1, 2, 1), (((0, 1),), ((0, 1),), ((1, 2),), ((1, 2),)))

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    if num_key_value_heads < 1 or num_heads < 1 or num_heads % num_key_value_heads:
        raise ValueError(
            f"expected query heads that divide by the key-value heads, got {num_heads} and {num_key_value_heads}: "
            "each key-value head serves as many query heads"
        )
    group = num_heads // num_key_value_heads
    if num_key_value_heads >= num_ranks:
        key_value = Split.even(num_key_value_heads, num_ranks)
        return HeadSplit(Split.of_sizes([group * size for size in key_value.sizes]), key_value)
    query_sizes: list[int] = []
    key_value_ranges: list[tuple[Range, ...]] = []
    for head, num_copies in enumerate(even_sizes(num_ranks, num_key_value_heads)):
        sizes = even_sizes(group, num_copies)
        query_sizes += sizes
        key_value_ranges += [((head, head + (size > 0)),) for size in sizes]
    return HeadSplit(Split.of_sizes(query_sizes), Split(num_key_value_heads, tuple(key_value_ranges)))


def check_size(what: str, value: Any, least: int = 0) -> None:
    """Refuses a size that is not an integer, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {what} to be an integer, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"expected {what} to be at least {least}, got {value}")


# Megatron's utilities, for code outside the layers: these divide by `Split`, for which no size needs to divide.


@checked_arguments
def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Refuses numbers that leave a remainder.

    Raises:
        ValueError: They do.

    Examples:
        >>> from scale_tp.split import ensure_divisibility
        >>> ensure_divisibility(12, 4)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    if denominator == 0 or numerator % denominator:
        raise ValueError(f"{numerator} is not divisible by {denominator}")


@checked_arguments
def divide(numerator: int, denominator: int) -> int:
    """Returns the quotient of numbers that leave no remainder.

    Raises:
        ValueError: They leave one.

    Example:
        >>> divide(6, 3)
        2

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


@checked_arguments
def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Returns equal parts of a tensor along its last dimension.

    Args:
        tensor: [..., features].
        num_partitions: How many parts.
        contiguous_split_chunks: Whether each part gets memory of its own; otherwise they are views.

    Returns:
        [..., features / num_partitions] each.

    Raises:
        ValueError: The features don't divide.

    Examples:
        >>> import torch
        >>> from scale_tp.split import split_tensor_along_last_dim
        >>> [part.shape for part in split_tensor_along_last_dim(torch.ones(2, 6), 3)]
        [torch.Size([2, 2]), torch.Size([2, 2]), torch.Size([2, 2])]

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    parts = tensor.split(divide(tensor.shape[-1], num_partitions), -1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else tuple(parts)


class VocabUtility:
    """Which words a rank has of a vocabulary: from the first to one past the last.

    Examples:
        >>> from scale_tp.split import VocabUtility
        >>> VocabUtility.vocab_range_from_global_vocab_size(100, 1, 4)  # of rank 1 of 4
        (25, 50)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """The words of a rank where each has as many.

        Example:
            >>> VocabUtility.vocab_range_from_per_partition_vocab_size(5, 1, 2)
            (5, 10)
        """
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """The words of a rank of `VocabParallelEmbedding` and `vocab_parallel_cross_entropy`; they need not divide.

        Raises:
            TypeError: A number is not an integer.
            ValueError: The rank does not exist.

        Example:
            >>> VocabUtility.vocab_range_from_global_vocab_size(9, 1, 2)
            (5, 9)
        """
        check_size("rank", rank, 0)
        check_size("world_size", world_size, rank + 1)
        ((start, stop),) = Split.even(global_vocab_size, world_size).ranges[rank]
        return start, stop
