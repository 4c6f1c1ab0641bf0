"""Blocks are the best there are: against all partitions, one by one."""

from itertools import combinations, pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from scale_pipe.partition.block_partition import block_partition


def all_partitions(length: int, num_blocks: int) -> list[list[int]]:
    cuts = (combinations(range(1, length), num_blocks - 1)) if num_blocks > 1 else [()]
    return [[end - start for start, end in pairwise((0, *cut, length))] for cut in cuts]


def block_sums(costs: list[int], sizes: list[int]) -> list[int]:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [sum(costs[start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_the_dearest_block_is_cheap_then_the_sums_are_even(costs: list[int], data: st.DataObject) -> None:
    num_blocks = data.draw(st.integers(1, len(costs)))

    def key(sizes: list[int]) -> tuple[int, int]:
        sums = block_sums(costs, sizes)
        return max(sums), sum(cost * cost for cost in sums)

    found = block_partition(costs, num_blocks)
    assert len(found) == num_blocks and min(found) >= 1 and sum(found) == len(costs)
    best = min(map(key, all_partitions(len(costs), num_blocks)))
    assert key(found) == best


def test_the_docstrings_row() -> None:
    assert block_partition([1, 2, 3, 4, 5, 6], 3) == [3, 2, 1]
    assert block_partition([5e-6] * 96, 16) == [6] * 16


def test_blocks_that_are_equally_dear_are_seen_as_equal() -> None:
    """8 + 12 and 19 + 1: a rounded unit would make one of them dearer and take a less even cut."""
    assert block_partition([8, 12, 2, 6, 17, 19, 1], 5) == [1, 1, 2, 1, 2]
    assert block_partition([1e300, 1e-300, 1.0], 2) == [1, 2]
