"""split.py: how the indices of a dimension are dealt to the ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scale_tp.split import (
    Split,
    VocabUtility,
    check_size,
    divide,
    ensure_divisibility,
    even_sizes,
    split_heads,
    split_tensor_along_last_dim,
)

SIZES = st.integers(0, 40)
RANKS = st.integers(1, 6)


def held(split: Split) -> list[list[int]]:
    return [[i for start, stop in ranges for i in range(start, stop)] for ranges in split.ranges]


@given(SIZES, RANKS)
def test_even_sizes_differ_by_one_and_the_larger_come_first(total: int, num_ranks: int) -> None:
    sizes = even_sizes(total, num_ranks)
    assert len(sizes) == num_ranks
    assert sum(sizes) == total
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(SIZES, RANKS, st.integers(1, 4))
def test_every_index_has_one_rank_and_blocks_stay_together(blocks: int, num_ranks: int, block: int) -> None:
    split = Split.even(blocks * block, num_ranks, block=block)
    assert [index for mine in held(split) for index in mine] == list(range(blocks * block))
    assert all(size % block == 0 for size in split.sizes)
    assert split.is_in_rank_order


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), RANKS)
def test_what_is_stacked_is_split_each_by_itself(totals: list[int], num_ranks: int) -> None:
    parts = [Split.even(total, num_ranks) for total in totals]
    split, offsets = Split.stacked(*parts), [sum(totals[:i]) for i in range(len(totals))]
    for rank in range(num_ranks):
        expected = [i + o for part, o in zip(parts, offsets, strict=True) for i in held(part)[rank]]
        assert held(split)[rank] == expected


@given(st.lists(st.integers(0, 9), min_size=1, max_size=3), RANKS, st.integers(0, 1))
def test_joining_what_was_taken_gives_the_whole(totals: list[int], num_ranks: int, dim: int) -> None:
    split = Split.stacked(*(Split.even(total, num_ranks) for total in totals))
    whole = torch.arange(split.total * 3).view(split.total, 3).movedim(0, dim)
    parts = [split.take(whole, rank, dim) for rank in range(num_ranks)]
    assert [part.shape[dim] for part in parts] == list(split.sizes)
    assert torch.equal(split.join(parts, dim), whole)


def test_a_stride_means_as_many_stacked_matrices() -> None:
    assert held(Split.strided(8, 2, 2)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert held(Split.strided(10, 2, 2)) == [[0, 1, 2, 5, 6, 7], [3, 4, 8, 9]]
    assert Split.strided(7, 3, 1) == Split.even(7, 3)
    assert not Split.strided(8, 2, 2).is_in_rank_order
    with pytest.raises(ValueError, match="stride to divide the 7 indices"):
        Split.strided(7, 2, 2)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "num_ranks", "queries", "key_values"),
    [
        (6, 6, 2, [3, 3], [[0, 1, 2], [3, 4, 5]]),
        (6, 3, 2, [4, 2], [[0, 1], [2]]),
        (6, 2, 4, [2, 1, 2, 1], [[0], [0], [1], [1]]),
        (6, 1, 4, [2, 2, 1, 1], [[0], [0], [0], [0]]),
        (2, 1, 4, [1, 1, 0, 0], [[0], [0], [], []]),
        (5, 5, 3, [2, 2, 1], [[0, 1], [2, 3], [4]]),
        (3, 3, 4, [1, 0, 1, 1], [[0], [], [1], [2]]),
    ],
)
def test_heads_are_dealt_with_their_key_value_heads(
    heads: int, key_value_heads: int, num_ranks: int, queries: list[int], key_values: list[list[int]]
) -> None:
    query, key_value = split_heads(heads, key_value_heads, num_ranks)
    assert list(query.sizes) == queries
    assert held(key_value) == key_values
    # Whoever has a query head has the key-value head that it attends to.
    for own_queries, own_keys in zip(held(query), held(key_value), strict=True):
        assert {head // (heads // key_value_heads) for head in own_queries} == set(own_keys)


def test_of_copies_the_first_counts() -> None:
    split = split_heads(6, 2, 4).key_value
    assert [split.is_first_copy(rank) for rank in range(4)] == [True, False, True, False]
    assert not split.is_in_rank_order
    whole = torch.arange(2)
    assert torch.equal(split.join([split.take(whole, rank) for rank in range(4)]), whole)


def test_ranges_in_common_are_the_same_or_refused() -> None:
    """Put together, they would be more than the whole."""
    with pytest.raises(ValueError, match=r"the same or to have nothing in common, got \[2, 5\) beside .* reach to 3"):
        Split(5, (((0, 3),), ((2, 5),)))
    assert split_heads(6, 2, 4).key_value.has_only_full_copies and Split.even(5, 2).has_only_full_copies
    assert not Split(2, (((0, 1), (1, 2)), ((0, 1),))).has_only_full_copies


def test_a_range_without_indices_may_stand_anywhere() -> None:
    assert Split(5, (((0, 5),), ((2, 2),), ())).sizes == (5, 0, 0)


def test_equal_splits_are_equal() -> None:
    assert Split.even(6, 2) == Split.of_sizes([3, 3])
    assert hash(Split.even(6, 2)) == hash(Split.of_sizes([3, 3]))
    assert Split.even(6, 2) != Split.of_sizes([2, 4])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Split.even(7, 2, block=2), "7 indices to be whole blocks of 2: 1 are left"),
        (lambda: Split.even(-1, 2), "got -1 things and 2 ranks"),
        (lambda: Split.even(4, 0), "got 4 things and 0 ranks"),
        (lambda: Split.of_sizes([2, -1]), r"sizes of 0 and more, got \[2, -1\]"),
        (lambda: Split.stacked(Split.even(2, 1), Split.even(2, 2)), r"one number of ranks, got \[1, 2\]"),
        (lambda: Split(3, (((0, 4),),)), r"within 3 indices, got \[0, 4\) for rank 0"),
        (lambda: Split(3, (((0, 1),), ((2, 3),))), "index 1 is none's"),
        (lambda: split_heads(5, 2, 2), "query heads that divide by the key-value heads, got 5 and 2"),
        (lambda: split_heads(4, 0, 2), "got 4 and 0"),
        (lambda: check_size("out_features", -1), "expected out_features to be at least 0, got -1"),
    ],
)
def test_what_makes_no_sense_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("value", [1.5, "3", None, True])
def test_a_size_that_is_no_integer_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="expected in_features to be an integer"):
        check_size("in_features", value)


@pytest.mark.fault(90)
def test_a_remainder_is_refused() -> None:
    assert divide(12, 4) == 3
    for numerator, denominator in ((7, 2), (7, 0)):
        for act in (ensure_divisibility, divide):
            with pytest.raises(ValueError, match=f"7 is not divisible by {denominator}"):
                act(numerator, denominator)


@pytest.mark.parametrize("contiguous", [True, False])
def test_a_tensor_is_cut_into_equal_parts(contiguous: bool) -> None:
    whole = torch.arange(12).view(2, 6)
    parts = split_tensor_along_last_dim(whole, 3, contiguous)
    assert torch.equal(torch.cat(parts, -1), whole) and [part.shape for part in parts] == [(2, 2)] * 3
    assert all(part.is_contiguous() == contiguous for part in parts)
    with pytest.raises(ValueError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(whole, 4)


def test_words_are_those_of_the_layers() -> None:
    for rank in range(3):
        found = VocabUtility.vocab_range_from_global_vocab_size(11, rank, 3)
        assert (found,) == Split.even(11, 3).ranges[rank]
        assert VocabUtility.vocab_range_from_per_partition_vocab_size(4, rank, 3) == (4 * rank, 4 * rank + 4)
    with pytest.raises(ValueError, match="expected world_size to be at least 4, got 3"):
        VocabUtility.vocab_range_from_global_vocab_size(11, 3, 3)
