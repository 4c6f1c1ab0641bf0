"""The search's own evaluation: what the plain one says, begun in the middle, with weight gradients where they fit."""

from random import Random

import pytest
from pipe_schedules import keeps_caps

from scale_pipe import Costs, simulate
from scale_pipe.schedules.list_scheduling import Codes, Problem, evaluate
from scale_pipe.schedules.lowering import build_schedule
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.solver.annealing import _keeps_cap, _propose_move
from scale_pipe.schedules.solver.partial_order import (
    Change,
    Search,
    drop_weight_gradients,
    insert_weight_gradients,
    renumber_micro_batches,
)
from scale_pipe.schedules.solver.search import sequential_orders
from scale_pipe.schedules.validate import validate


def problem_of(placement: StagePlacement, num_micro_batches: int, cap: int, link: float) -> Problem:
    """A problem of uneven stages, some times of which are nothing."""
    stages = range(placement.num_stages)
    costs = Costs.measured(
        [1 + stage % 3 / 8 for stage in stages],
        [1.25 - stage % 2 for stage in stages],
        [0.5 + stage % 4 / 4 if stage else 0.0 for stage in stages],
        link,
    )
    return Problem.build(placement, num_micro_batches, costs, (cap,) * placement.num_ranks)


def neighbors(problem: Problem, orders: Codes, number: int, seed: int):
    """Yields (orders, where they differ from the ones before), each a step from the last that runs."""
    random = Random(seed)
    by_kind = (1, 0, -1) if problem.has_weight_gradients(orders) else (1, -1, 0)
    effects = [effect for effect in by_kind for _ in range(problem.size)]
    search, current = Search(problem, goal=0.0), [list(order) for order in orders]
    timing = search.evaluate(current, patience=0.75)
    while number:
        rank = random.randrange(len(current))
        changed = _propose_move(problem, current[rank], random.randrange(len(current[rank])), random)
        if changed is None or not _keeps_cap(problem, effects, rank, current[rank], *changed):
            continue
        number -= 1
        first, part = changed
        new = [list(order) for order in current]
        new[rank][first : first + len(part)] = part
        yield new, Change(timing, rank, first)
        found = search.evaluate(new, patience=0.75)
        if found is not None:
            current, timing = new, found


CASES = [
    (StagePlacement.wave(2), 3, 2, 0.0),
    (StagePlacement.wave(3), 5, 4, 0.25),
    (StagePlacement.loop(3, 2), 4, 5, 0.0),
    (StagePlacement((0, 1, 2, 0)), 4, 2, 0.5),
]


@pytest.mark.parametrize("placement, num_micro_batches, cap, link", CASES)
@pytest.mark.parametrize("whole", [False, True])
def test_from_a_change_on_it_is_what_it_is_from_the_start(
    placement: StagePlacement, num_micro_batches: int, cap: int, link: float, whole: bool
) -> None:
    problem = problem_of(placement, num_micro_batches, cap, link)
    orders = sequential_orders(problem)
    num_running = 0
    for new, change in neighbors(problem, orders if whole else drop_weight_gradients(problem, orders), 300, seed=1):
        search = Search(problem, goal=0.0)
        expected = search.evaluate(new, patience=0.75)
        visits = search.visits
        assert search.evaluate(new, patience=0.75, change=change) == expected
        assert search.visits - visits <= visits, "it passes no more actions"
        if expected is None:
            continue  # a deadlock
        num_running += 1
        found = insert_weight_gradients(problem, new, expected)
        assert keeps_caps(problem, found)
        rank_ends = evaluate(problem, found)
        assert max(rank_ends) == pytest.approx(expected.makespan, rel=1e-12)
        assert rank_ends == pytest.approx(list(expected.rank_ends), rel=1e-12)
        for limit in (expected.makespan - 1e-6, expected.makespan):
            assert (search.evaluate(new, limit, 0.75) is None) == (limit < expected.makespan)
        assert search.evaluate(new, expected.makespan, 0.75, change) == expected
    assert num_running > 20


def test_it_finds_orders_that_deadlock() -> None:
    problem = problem_of(StagePlacement.loop(2), 2, 2, 0.0)
    # rank 0 wants the gradient of the first micro-batch before the second forward, rank 1 both forwards first
    assert Search(problem, goal=0.0).evaluate([[0, 4, 1, 5], [2, 3, 6, 7]]) is None
    assert Search(problem, goal=0.0).evaluate([[0, 1, 4, 5], [2, 3, 6, 7]]) is not None


def test_weight_gradients_fill_idle_times_or_are_forced() -> None:
    placement = StagePlacement.loop(2)
    costs = Costs.uniform(2, forward=1.0, input_gradient=1.0, weight_gradient=1.0)
    problem = Problem.build(placement, 3, costs, (2, 3))
    partial = [[0, 1, 6, 2, 7, 8], [3, 9, 4, 10, 5, 11]]
    timing = Search(problem, goal=0.0).evaluate(partial)
    assert timing is not None
    schedule = build_schedule(
        "partial", placement, 3, problem.orders(insert_weight_gradients(problem, partial, timing))
    )
    assert str(schedule).splitlines()[1:] == [
        "rank 0: F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",  # W0.0 makes room for F0.2, W0.1 fills a gap
        "rank 1: F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",  # W1.0 fills the gap before F1.2
    ]
    validate(schedule, memory_cap=(2, 3))
    assert simulate(schedule, costs).makespan == timing.makespan


def test_patience_is_the_share_of_a_weight_gradient_that_fits() -> None:
    problem = Problem.build(StagePlacement.loop(2), 2, Costs.uniform(2, weight_gradient=1.5), (2, 2))
    partial = [[0, 1, 4, 5], [2, 6, 3, 7]]
    patient, hasty = (Search(problem, goal=0.0).evaluate(partial, patience=patience) for patience in (1.0, 0.5))
    assert patient is not None
    assert hasty is not None
    assert patient.weights_before == [[], []]
    assert hasty.weights_before == [[3], []], "rank 0 is idle for 1 before I0.1, where 1.5 are owed"


def test_micro_batches_are_put_in_order() -> None:
    assert renumber_micro_batches([3, 1, 2, 7, 0, 4], 4) == [0, 1, 2, 4, 3, 7 - 2]
    assert renumber_micro_batches([6, 2, 5], 4) == [5, 2, 6]
