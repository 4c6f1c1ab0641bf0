"""The solver beside all plans that there are."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_checkpoint.planner import solver
from scale_checkpoint.planner.solver import fastest, least_peak
from scale_checkpoint.planner.timeline import Crossing, Segment, Timeline, Way, timeline

small = st.integers(0, 12)


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[Segment, ...], tuple[Crossing, ...]]:
    """Up to six segments: blocks of one to three ways, some that come again, tensors that cross some of them."""
    num_segments = draw(st.integers(1, 6))
    crossings = []
    for _ in range(draw(st.integers(0, 3))):
        born = draw(st.integers(0, num_segments - 1))
        crossings.append(Crossing(draw(small), born, draw(st.integers(born, num_segments - 1))))
    segments: list[Segment] = []
    for j in range(num_segments):
        near = [number for number, crossing in enumerate(crossings) if crossing.born <= j <= crossing.last]
        names = ["keep", "recompute", "offload"][: draw(st.integers(1, 3))]
        ways = {}
        for name in names:
            holds = tuple(number for number in near if draw(st.booleans()))
            early = (draw(small), draw(small)) if name == "offload" else (0, 0)
            ways[name] = Way(draw(small) / 4, draw(small), draw(small), draw(small), *early, holds)
        again = [segment for segment in segments if segment.is_block and set(segment.ways) == set(ways)]
        name = again[0].name if again and draw(st.booleans()) else str(j)
        segments.append(Segment(name, draw(small), draw(small), ways))
    return tuple(segments), tuple(crossings)


def all_plans(segments: Sequence[Segment], crossings: Sequence[Crossing]) -> list[Timeline]:
    plans = []
    for ways in itertools.product(*(segment.ways for segment in segments)):
        by_name: dict[str, set[str]] = {}
        for segment, way in zip(segments, ways, strict=True):
            by_name.setdefault(segment.name, set()).add(way)
        if all(len(found) == 1 for found in by_name.values()):
            plans.append(timeline(segments, crossings, ways))
    return plans


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps(), st.integers(0, 60))
def test_no_plan_within_the_budget_is_faster(
    step: tuple[tuple[Segment, ...], tuple[Crossing, ...]], budget: int
) -> None:
    segments, crossings = step
    fitting = [plan.seconds for plan in all_plans(segments, crossings) if plan.peak_bytes <= budget]
    found = fastest(segments, crossings, budget)
    assert (found is None) == (not fitting)
    if found is not None:
        played = timeline(segments, crossings, found)
        assert played.peak_bytes <= budget
        assert played.seconds == min(fitting)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps())
def test_the_least_peak_is_that_of_the_smallest_plan(
    step: tuple[tuple[Segment, ...], tuple[Crossing, ...]],
) -> None:
    segments, crossings = step
    assert least_peak(segments, crossings) == min(plan.peak_bytes for plan in all_plans(segments, crossings))


def uneven(num_blocks: int) -> tuple[Segment, ...]:
    """Blocks of which no two sums of kept bytes are equal."""
    return tuple(
        Segment(str(j), 10, 10, {"keep": Way(1.0, 3**j, 0, 0), "recompute": Way(1.0 + 1.07**j, 0, 0, 3**j if j else 1)})
        for j in range(num_blocks)
    )


def test_a_front_that_grows_too_long_is_rounded_up_and_the_plan_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = uneven(9)
    budget = least_peak(segments, ()) + 900
    found = fastest(segments, (), budget)
    assert found is not None
    exact = timeline(segments, (), found)
    monkeypatch.setattr(solver, "MAX_FRONT", 8)
    rounded = fastest(segments, (), budget)
    assert rounded is not None
    played = timeline(segments, (), rounded)
    assert played.peak_bytes <= budget
    assert exact.seconds <= played.seconds


def test_a_hundred_equal_blocks_are_solved_at_once() -> None:
    ways = {"keep": Way(3.0, 80, 90, 20), "recompute": Way(4.0, 1, 40, 100), "selective": Way(3.2, 40, 60, 50)}
    segments = tuple(Segment(str(j), 5, 5 + j, ways) for j in range(100))
    least, most = least_peak(segments, ()), timeline(segments, (), ["keep"] * 100).peak_bytes
    assert least < most
    times = []
    for budget in range(least, most + 1, (most - least) // 4):
        found = fastest(segments, (), budget)
        assert found is not None
        times.append(timeline(segments, (), found).seconds)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
