"""The search over orders: it gets better, never breaks a cap, repeats, and follows what holds a schedule up."""

import pytest

from scale_pipe import Costs, Placement, lower_bound
from scale_pipe.schedules.solver.annealing import Heat, Search, anneal, critical_path
from scale_pipe.schedules.solver.partial_order import backbone_of
from scale_pipe.schedules.solver.problem import Problem, evaluate
from scale_pipe.schedules.solver.search import one_by_one

PLACEMENT = Placement.wave(3)


def problem_of(cap: int) -> Problem:
    return Problem.of(PLACEMENT, 5, Costs.uniform(6, input_gradient=1.4, weight_gradient=0.6), (cap,) * 3)


@pytest.mark.parametrize("whole", [False, True])
def test_it_gets_better_keeps_the_cap_and_repeats(whole: bool) -> None:
    found = []
    for _ in range(2):
        problem = problem_of(4)
        orders = one_by_one(problem)
        search = Search(problem, goal=0.0)
        best, best_orders = anneal(
            search,
            orders if whole else backbone_of(problem, orders),
            300_000,
            heat=Heat(0.2, 0.02),
            patience=1.0,
            seed=3,
        )
        times = evaluate(problem, search.codes)
        assert times is not None
        assert times.makespan == pytest.approx(search.makespan, rel=1e-12)
        assert best == search.makespan
        assert search.time(best_orders).makespan == best
        assert all(problem.fits(order, rank) for rank, order in enumerate(search.codes))
        assert [sorted(order) for order in search.codes] == [sorted(order) for order in orders]
        assert search.visits < 310_000
        found.append(search.codes)
    assert found[0] == found[1]
    assert search.makespan < 0.6 * evaluate(problem, orders).makespan


def test_it_ends_where_nothing_better_is_possible() -> None:
    problem = problem_of(6)
    goal = lower_bound(PLACEMENT, 5, problem.costs, 3).makespan
    search = Search(problem, goal)
    anneal(search, backbone_of(problem, one_by_one(problem)), 5_000_000, heat=Heat(0.2, 0.02), patience=1.0, seed=0)
    assert search.makespan == pytest.approx(goal, rel=1e-12)
    assert search.visits < 2_000_000


def test_what_is_on_the_critical_path_fills_the_makespan() -> None:
    problem = problem_of(4)
    orders = one_by_one(problem)
    search = Search(problem, goal=0.0)
    _, orders = anneal(search, orders, 50_000, heat=Heat(0.1, 0.02), patience=1.0, seed=0)
    timing = search.time(orders)
    assert timing is not None
    path = critical_path(problem, orders, timing)
    assert sum(problem.durations[orders[rank][position]] for rank, position in path) == pytest.approx(timing.makespan)
    assert problem.sources[orders[path[-1][0]][path[-1][1]]] == -1, "it begins with what waits for nothing"
