"""offload_plan.py: which elements have their state on the host."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from scale_fsdp.offload.placement import host_counts, ranges


def cases() -> Iterator[tuple[list[int], int]]:
    """Sizes of parameters, and how many elements are wanted on the host."""
    draw = random.Random(0)
    for _ in range(300):
        sizes = [draw.choice((0, 1, 64, draw.randrange(500))) for _ in range(draw.randint(1, 12))]
        yield sizes, round(draw.choice((0.0, draw.random(), 1.0)) * sum(sizes))


@pytest.mark.parametrize("multiple", [1, 64])
def test_at_most_one_parameter_is_cut_and_the_number_is_right(multiple: int) -> None:
    for sizes, wanted in cases():
        counts = host_counts(sizes, wanted, [multiple] * len(sizes))
        assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
        cut = [count for count, size in zip(counts, sizes, strict=True) if 0 < count < size]
        assert len(cut) <= 1 and all(count % multiple == 0 for count in cut)
        assert abs(sum(counts) - wanted) <= multiple // 2


def test_whole_parameters_come_as_near_as_the_next_one_allows() -> None:
    for sizes, wanted in cases():
        counts = host_counts(sizes, wanted, [0] * len(sizes))
        assert all(count in (0, size) for count, size in zip(counts, sizes, strict=True))
        left = wanted - sum(counts)
        assert abs(left) <= max(sizes) / 2 or 0 < left < max(sizes)


def test_the_last_parameters_go_first_and_the_cut_one_keeps_its_end_on_the_device() -> None:
    assert host_counts([10, 20, 30], 45, [1, 1, 1]) == [0, 15, 30]
    assert host_counts([10, 20, 30], 60, [1, 1, 1]) == [10, 20, 30]
    assert host_counts([10, 20, 30], 0, [1, 1, 1]) == [0, 0, 0]


def test_what_can_not_be_cut_is_passed_over_for_what_fits() -> None:
    assert host_counts([10, 500, 30], 40, [1, 0, 1]) == [10, 0, 30]


def test_ranges_cover_everything_once() -> None:
    assert ranges(10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert ranges(8, 4) == [(0, 4), (4, 8)]
    assert ranges(0, 4) == [(0, 0)]
