"""The solver: the goals that a few seconds suffice for, its promises, and its refusals."""

import json
from pathlib import Path

import pytest

from scale_pipe import Costs, Schedule, simulate, solve
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.registry import classic_schedules
from scale_pipe.schedules.schedule import MemoryCapError
from scale_pipe.schedules.solver.search import keeps_caps
from scale_pipe.schedules.solver.solver import VISITS_AT_4_X_8
from scale_pipe.schedules.validate import validate


def solved(ranks: int, batches: int, stages: int, input_gradient: float, cap: float | None, visits: int | None = None):
    """Solves with F = 1 and I + W = 2."""
    costs = Costs.uniform(ranks * stages, input_gradient=input_gradient, weight_gradient=2 - input_gradient)
    return solve(costs, ranks, batches, memory_cap=cap, visits=visits)


@pytest.mark.parametrize(
    "stages, input_gradient, cap, goal",
    [
        (2, 1.0, 4, 0.0589),
        (2, 1.4, 4, 0.081),
        (2, 1.4, 5, 0.0589),
        (2, 1.6, 5, 0.081),
        (2, 1.0, 3, 0.095),
        (4, 1.4, 4, 0.044),
        (4, 1.6, 4, 0.048),
    ],
)
def test_four_ranks_and_eight_micro_batches_reach_the_goals(
    stages: int, input_gradient: float, cap: float, goal: float
) -> None:
    solution = solved(4, 8, stages, input_gradient, cap)
    validate(solution.schedule, memory_cap=cap)
    assert solution.bubble <= goal
    assert solution.gap < 1e-9, "these are proved to be the fastest"


@pytest.mark.parametrize(
    "stages, input_gradient, cap, goal",
    [(2, 1.6, 4, 0.121), (2, 1.4, 3, 0.165), (2, 1.6, 3, 0.205)],
)
def test_they_do_where_no_proof_ends_the_search(stages: int, input_gradient: float, cap: float, goal: float) -> None:
    solution = solved(4, 8, stages, input_gradient, cap)
    validate(solution.schedule, memory_cap=cap)
    assert solution.bubble <= goal
    assert solution.visits <= 1.01 * VISITS_AT_4_X_8, "no more time goes into it than was promised"


@pytest.mark.soak
@pytest.mark.parametrize(
    "stages, input_gradient, cap, goal",
    [(2, 1.4, 8, 0.0995), (2, 1.6, 12, 0.086), (4, 1.4, 8, 0.053), (4, 1.6, 8, 0.056)],
)
def test_eight_ranks_and_sixteen_micro_batches_reach_the_goals(
    stages: int, input_gradient: float, cap: float, goal: float
) -> None:
    solution = solved(8, 16, stages, input_gradient, cap)
    validate(solution.schedule, memory_cap=cap)
    assert solution.bubble <= goal


@pytest.mark.parametrize("input_gradient, cap", [(1.0, 4), (1.4, 4), (1.6, 4)])
def test_in_a_v_the_busiest_of_uneven_stages_is_never_idle(input_gradient: float, cap: float) -> None:
    scale = [1.2, *[1.0] * 6, 1.5]
    costs = Costs.measured(
        scale, [input_gradient * time for time in scale], [(2 - input_gradient) * time for time in scale]
    )
    in_a_v = solve(costs, 4, 8, memory_cap=cap, placement=StagePlacement.wave(4))
    validate(in_a_v.schedule, memory_cap=cap)
    assert in_a_v.bubble == pytest.approx(0, abs=1e-9)
    assert in_a_v.makespan == pytest.approx(8 * 3 * (1.2 + 1.5), rel=1e-12)


@pytest.mark.parametrize("ranks, stages, batches", [(1, 2, 3), (2, 2, 3), (3, 6, 2), (3, 7, 4), (2, 6, 5), (4, 4, 8)])
def test_it_is_never_slower_than_a_classic_and_keeps_the_cap(ranks: int, stages: int, batches: int) -> None:
    costs = Costs.measured(
        [1 + s % 2 for s in range(stages)], [1.5] * stages, [0.5 + s / 9 for s in range(stages)], 0.2
    )
    for cap in (2, ranks, None):
        solution = solve(costs, ranks, batches, memory_cap=cap, visits=100_000)
        validate(solution.schedule, memory_cap=cap)
        assert solution.makespan >= solution.best_bound - 1e-9
        for classic in classic_schedules(ranks, stages, batches):
            if keeps_caps(classic, (cap or float("inf"),) * ranks):
                assert solution.makespan <= simulate(classic, costs).makespan + 1e-9


def test_it_finds_the_same_schedule_in_any_unit_of_time() -> None:
    costs = Costs.uniform(8, forward=1.0, input_gradient=1.5, weight_gradient=0.5)
    small = Costs.uniform(8, forward=2.0**-12, input_gradient=1.5 * 2.0**-12, weight_gradient=0.5 * 2.0**-12)
    first = solve(costs, 4, 6, memory_cap=3, visits=300_000)
    assert solve(costs, 4, 6, memory_cap=3, visits=300_000) == first
    assert solve(small, 4, 6, memory_cap=3, visits=300_000).schedule == first.schedule


def test_solutions_are_kept_by_their_inputs(tmp_path: Path) -> None:
    path, costs = tmp_path / "solutions.json", Costs.uniform(4)
    first = solve(costs, 2, 4, visits=50_000, cache=path)
    content = json.loads(path.read_text())
    (key,) = content["solutions"]
    assert Schedule.from_json(content["solutions"][key]["schedule"]) == first.schedule
    content["solutions"][key]["visits"] = 7  # to see that it is read
    path.write_text(json.dumps(content))
    assert solve(costs, 2, 4, visits=50_000, cache=path).visits == 7
    assert solve(costs, 2, 4, visits=50_000, memory_cap=2, cache=path).visits != 7
    assert len(json.loads(path.read_text())["solutions"]) == 2
    assert list(tmp_path.iterdir()) == [path]


def test_a_cache_that_is_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    for text in ("{", "[]", '{"format": 9, "solutions": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="name another file as cache="):
            solve(Costs.uniform(2), 2, 2, cache=path)
        assert path.read_text() == text


def test_what_cannot_be_solved_is_refused() -> None:
    with pytest.raises(MemoryCapError, match=r"rank 0: one micro-batch on each of its 2 stages must fit"):
        solve(Costs.uniform(4), 2, 4, memory_cap=0.5)
    with pytest.raises(ValueError, match="3 ranks, but costs for 2 stages"):
        solve(Costs.uniform(2), 3, 4)
    with pytest.raises(ValueError, match="num_ranks is 2, but the placement has 4 ranks"):
        solve(Costs.uniform(4), 2, 4, placement=StagePlacement.loop(4))


def test_a_solution_says_how_good_it_is() -> None:
    text = str(solved(4, 8, 2, 1.4, 4))
    assert "V placement: makespan 52.2, bubble 8.05%, peak 4 live micro-batches; proved to be the fastest" in text
    assert "bound 52.2: rank 3 starts at 3 at the soonest" in text
    assert "best classic: ZB-V takes" in text
