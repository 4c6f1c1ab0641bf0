"""partition.py: every element has one owner, and nobody has much more than the others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest

from scale_core.flat.packing import group_in_buckets
from scale_oss.buckets.partition import assign_whole, choose_owners, cut_evenly, group_from_the_end

SHAPES: list[tuple[int, ...]] = [(7, 3), (), (5,), (0, 4), (1, 1, 9), (100, 3)]
NAMES = [f"parameter {index}" for index in range(len(SHAPES))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
@pytest.mark.parametrize("whole", [False, True])
def test_every_element_belongs_to_one_rank(world_size: int, whole: bool) -> None:
    if whole:
        owners = choose_owners([math.prod(shape) for shape in SHAPES], world_size)
        partition = assign_whole(NAMES, SHAPES, owners, world_size)
        assert partition.padding == 0
    else:
        partition = cut_evenly(NAMES, SHAPES, world_size)
        assert partition.is_even
    for index, (shape, entry) in enumerate(zip(SHAPES, partition.entries, strict=True)):
        seen: list[int] = []
        for rank, spans in enumerate(partition.spans_by_rank):
            span = spans[index]
            seen += range(span.start, span.stop)
            if span.numel:
                # The local part of the buffer is where the full buffer has these elements.
                assert partition.start(rank) + span.shard_offset == entry.offset + span.start
                assert span.shard_offset + span.numel <= partition.sizes[rank]
                assert math.prod(span.shape) == span.numel and (not whole or span.shape == shape)
        assert seen == list(range(math.prod(shape)))
    assert sum(partition.sizes) == partition.full_numel


def test_one_giant_tensor_is_shared_evenly_by_element() -> None:
    partition = cut_evenly(["giant", "a", "b", "c"], [(1000, 1000), (3,), (3,), (3,)], 2)
    held = [sum(span.numel for span in spans) for spans in partition.spans_by_rank]
    assert max(held) - min(held) <= 1009  # Full tensors stand at 1,000,000 to 9.


def test_no_rank_has_more_than_a_share_and_the_largest_tensor() -> None:
    random.seed(0)
    for _ in range(200):
        numels = [random.choice([1, 5, 17, 1000, 4096]) for _ in range(random.randint(1, 40))]
        world_size = random.randint(1, 8)
        owners = choose_owners(numels, world_size)
        loads = [sum(n for n, owner in zip(numels, owners, strict=True) if owner == rank) for rank in range(world_size)]
        assert max(loads) <= sum(numels) / world_size + max(numels)


def test_what_ranks_have_already_counts() -> None:
    assert choose_owners([1, 1], 2, loads=[5, 0]) == [1, 1]
    assert choose_owners([0, 0, 0], 3) == [0, 1, 2]


@pytest.mark.parametrize("group", [group_in_buckets, group_from_the_end])
def test_buckets_keep_the_order_and_the_size(
    group: Callable[[Sequence[int], int], list[list[int]]],
) -> None:
    random.seed(1)
    numels = [random.randint(0, 30) for _ in range(50)]
    buckets = group(numels, 25)
    assert [index for bucket in buckets for index in bucket] == list(range(50))
    assert all(len(bucket) == 1 or sum(numels[index] for index in bucket) <= 25 for bucket in buckets)
    assert group([], 25) == []


def test_what_is_left_over_is_the_bucket_that_is_reduced_last() -> None:
    assert [len(bucket) for bucket in group_from_the_end([1] * 10, 4)] == [2, 4, 4]


def test_aligned_tensors_of_one_owner_start_at_multiples() -> None:
    partition = assign_whole(["a", "b", "c"], [(2, 2), (3,), (5,)], [1, 0, 1], 2, alignment=4)
    assert partition.sizes == (4, 12) and [entry.offset for entry in partition.entries] == [4, 0, 8]
    assert [span.shard_offset for span in partition.spans_by_rank[1] if span.numel] == [0, 4]
    assert partition.padding == 1 + 3
