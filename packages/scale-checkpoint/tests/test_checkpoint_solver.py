"""The solver beside all plans that there are."""

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scale_checkpoint.planner import solver
from scale_checkpoint.planner.solver import fastest, minimum_peak
from scale_checkpoint.planner.timeline import BoundaryTensor, Segment, StrategyCost, Timeline, timeline

small = st.integers(0, 12)


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[Segment, ...], tuple[BoundaryTensor, ...]]:
    """Up to six segments: blocks of one to three strategies, some that come again, tensors that cross some of them."""
    num_segments = draw(st.integers(1, 6))
    tensors = []
    for _ in range(draw(st.integers(0, 3))):
        producer = draw(st.integers(0, num_segments - 1))
        tensors.append(BoundaryTensor(draw(small), producer, draw(st.integers(producer, num_segments - 1))))
    segments: list[Segment] = []
    for j in range(num_segments):
        near = [number for number, tensor in enumerate(tensors) if tensor.producer <= j <= tensor.last_reader]
        names = ["keep", "recompute", "offload"][: draw(st.integers(1, 3))]
        strategies = {}
        for name in names:
            holds = tuple(number for number in near if draw(st.booleans()))
            early = (draw(small), draw(small)) if name == "offload" else (0, 0)
            strategies[name] = StrategyCost(draw(small) / 4, draw(small), draw(small), draw(small), *early, holds)
        again = [segment for segment in segments if segment.is_block and set(segment.costs) == set(strategies)]
        name = again[0].name if again and draw(st.booleans()) else str(j)
        segments.append(Segment(name, draw(small), draw(small), strategies))
    return tuple(segments), tuple(tensors)


def all_plans(segments: Sequence[Segment], tensors: Sequence[BoundaryTensor]) -> list[Timeline]:
    plans = []
    for strategies in itertools.product(*(segment.costs for segment in segments)):
        by_name: dict[str, set[str]] = {}
        for segment, strategy in zip(segments, strategies, strict=True):
            by_name.setdefault(segment.name, set()).add(strategy)
        if all(len(found) == 1 for found in by_name.values()):
            plans.append(timeline(segments, tensors, strategies))
    return plans


@settings(max_examples=300, deadline=None, derandomize=True)
@given(steps(), st.integers(0, 60))
def test_no_plan_within_the_budget_is_faster(
    step: tuple[tuple[Segment, ...], tuple[BoundaryTensor, ...]], budget: int
) -> None:
    segments, tensors = step
    fitting = [plan.seconds for plan in all_plans(segments, tensors) if plan.peak_bytes <= budget]
    found = fastest(segments, tensors, budget)
    assert (found is None) == (not fitting)
    if found is not None:
        played = timeline(segments, tensors, found)
        assert played.peak_bytes <= budget
        assert played.seconds == min(fitting)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(steps())
def test_the_minimum_peak_is_that_of_the_smallest_plan(
    step: tuple[tuple[Segment, ...], tuple[BoundaryTensor, ...]],
) -> None:
    segments, tensors = step
    assert minimum_peak(segments, tensors) == min(plan.peak_bytes for plan in all_plans(segments, tensors))


def uneven(num_blocks: int) -> tuple[Segment, ...]:
    """Blocks of which no two sums of kept bytes are equal."""
    return tuple(
        Segment(
            str(j),
            10,
            10,
            {"keep": StrategyCost(1.0, 3**j, 0, 0), "recompute": StrategyCost(1.0 + 1.07**j, 0, 0, 3**j if j else 1)},
        )
        for j in range(num_blocks)
    )


def test_a_front_too_long_is_rounded_up_and_the_plan_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    segments = uneven(9)
    budget = minimum_peak(segments, ()) + 900
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
    strategies = {
        "keep": StrategyCost(3.0, 80, 90, 20),
        "recompute": StrategyCost(4.0, 1, 40, 100),
        "selective": StrategyCost(3.2, 40, 60, 50),
    }
    segments = tuple(Segment(str(j), 5, 5 + j, strategies) for j in range(100))
    least, most = minimum_peak(segments, ()), timeline(segments, (), ["keep"] * 100).peak_bytes
    assert least < most
    times = []
    for budget in range(least, most + 1, (most - least) // 4):
        found = fastest(segments, (), budget)
        assert found is not None
        times.append(timeline(segments, (), found).seconds)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
