"""Block partition: a sequence of costs cut into blocks of neighbors, so that the largest block cost is minimal.

    costs   1  2  3  4  5  6        3 blocks: [1 2 3] [4 5] [6]        sums 6, 9, 6

Of all cuts with that largest cost, the one whose block costs are most even: the least sum of their squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise


def block_partition(costs: Sequence[float], num_blocks: int) -> list[int]:
    """Returns how many costs each block has; costs are finite and not negative, and no fewer than blocks.

    >>> block_partition([1, 2, 3, 4, 5, 6], 3)
    [3, 2, 1]
    """
    sums = [0, *accumulate(_whole_numbers(costs))]
    return _most_even(sums, num_blocks, _least_maximum(sums, num_blocks))


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """Returns `costs` as multiples of one unit, without rounding: a float is a whole number over a power of two."""
    fractions = [Fraction(float(cost)) for cost in costs]
    unit = math.lcm(*(fraction.denominator for fraction in fractions))
    return [int(fraction * unit) for fraction in fractions]


def _least_maximum(sums: list[int], num_blocks: int) -> int:
    """Returns the largest block cost of the best partition, from the sums of the first 0, 1, ... costs."""
    low = max(later - sooner for sooner, later in pairwise(sums))
    high = sums[-1]
    while low < high:
        middle = (low + high) // 2
        if _num_blocks_within(sums, middle) <= num_blocks:
            high = middle
        else:
            low = middle + 1
    return high


def _num_blocks_within(sums: list[int], limit: int) -> int:
    """Returns how many blocks of a cost up to `limit` are needed; no single cost is above it."""
    count, start = 1, 0
    for index in range(1, len(sums)):
        if sums[index] - sums[start] > limit:
            count, start = count + 1, index - 1
    return count


def _most_even(sums: list[int], num_blocks: int, limit: int) -> list[int]:
    """Returns the sizes of blocks of a cost up to `limit` with the least sum of squared costs."""
    length = len(sums) - 1
    least: list[int | None] = [0, *[None] * length]
    starts: list[list[int]] = []
    for block in range(1, num_blocks + 1):
        cuts: list[int | None] = [None] * (length + 1)
        begins = [0] * (length + 1)
        for end in range(block, length - num_blocks + block + 1):
            for start in range(end - 1, block - 2, -1):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                before = least[start]
                if before is None:
                    continue
                total, best = before + cost * cost, cuts[end]
                if best is None or total < best:
                    cuts[end], begins[end] = total, start
        least = cuts
        starts.append(begins)
    sizes, end = [], length
    for begins in reversed(starts):
        sizes.append(end - begins[end])
        end = begins[end]
    assert end == 0 and min(sizes) > 0
    return sizes[::-1]
