"""The search over orders: it gets better, never breaks a cap, repeats, and follows what holds a schedule up."""

from itertools import cycle
from random import Random

import pytest
from pipe_schedules import keeps_caps

from scale_pipe import Costs
from scale_pipe.schedules.list_scheduling import Problem, evaluate
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.solver import annealing
from scale_pipe.schedules.solver.annealing import Temperatures, _shift_several, anneal, critical_path
from scale_pipe.schedules.solver.bounds import lower_bound
from scale_pipe.schedules.solver.partial_order import Search, drop_weight_gradients
from scale_pipe.schedules.solver.search import sequential_orders

PLACEMENT = StagePlacement.wave(3)


def problem_of(cap: int) -> Problem:
    return Problem.build(PLACEMENT, 5, Costs.uniform(6, input_gradient=1.4, weight_gradient=0.6), (cap,) * 3)


@pytest.mark.parametrize("whole", [False, True])
def test_it_gets_better_keeps_the_cap_and_repeats(whole: bool) -> None:
    found = []
    for _ in range(2):
        problem = problem_of(4)
        orders = sequential_orders(problem)
        search = Search(problem, goal=0.0)
        best, best_orders = anneal(
            search,
            orders if whole else drop_weight_gradients(problem, orders),
            300_000,
            temperatures=Temperatures(0.2, 0.02),
            patience=1.0,
            seed=3,
        )
        rank_ends = evaluate(problem, search.codes)
        assert max(rank_ends) == pytest.approx(search.makespan, rel=1e-12)
        assert best == search.makespan
        assert search.evaluate(best_orders).makespan == best
        assert keeps_caps(problem, search.codes)
        assert [sorted(order) for order in search.codes] == [sorted(order) for order in orders]
        assert search.visits < 310_000
        found.append(search.codes)
    assert found[0] == found[1]
    assert search.makespan < 0.6 * max(evaluate(problem, orders))


def test_it_ends_where_nothing_better_is_possible() -> None:
    problem = problem_of(6)
    goal = lower_bound(PLACEMENT, 5, problem.costs, 3).makespan
    search = Search(problem, goal)
    anneal(
        search,
        drop_weight_gradients(problem, sequential_orders(problem)),
        5_000_000,
        temperatures=Temperatures(0.2, 0.02),
        patience=1.0,
        seed=0,
    )
    assert search.makespan == pytest.approx(goal, rel=1e-12)
    assert search.visits < 2_000_000


def test_what_is_on_the_critical_path_fills_the_makespan() -> None:
    problem = problem_of(4)
    orders = sequential_orders(problem)
    search = Search(problem, goal=0.0)
    _, orders = anneal(search, orders, 50_000, temperatures=Temperatures(0.1, 0.02), patience=1.0, seed=0)
    timing = search.evaluate(orders)
    assert timing is not None
    path = critical_path(problem, orders, timing)
    assert sum(problem.durations[orders[rank][position]] for rank, position in path) == pytest.approx(timing.makespan)
    assert problem.sources[orders[path[-1][0]][path[-1][1]]] == -1, "it begins with what waits for nothing"


class Given(Random):
    """Numbers that are given, over and over."""

    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self._numbers = cycle(numbers)

    def random(self) -> float:
        return next(self._numbers)


def test_neighboring_micro_batches_are_shifted_together() -> None:
    problem, order = problem_of(6), list(range(10))  # The first two stages' forwards of five micro-batches.
    assert _shift_several(problem, order, 0, 2, Given(0.5)) == (0, [3, 4, 0, 1, 2])
    assert _shift_several(problem, order, 5, -2, Given(0.5)) == (3, [5, 6, 7, 3, 4])
    assert _shift_several(problem, order, 5, 3, Given(0.5)) is None  # It would end behind the order.


def test_a_shift_of_several_is_as_long_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    distances: list[int] = []
    monkeypatch.setattr(annealing, "_shift_several", lambda *given: distances.append(given[3]))
    for direction, length in ((0.0, 0.0), (0.0, 0.999), (0.9, 0.999)):
        annealing._propose_move(problem_of(6), list(range(10)), 5, Given(direction, 0.0, length))
    longest = annealing.MAX_SHIFT_OF_SEVERAL
    assert distances == [1, longest, -longest] and longest > 1


def test_a_move_that_would_change_nothing_is_not_proposed() -> None:
    """Micro-batches of a stage keep their order, so that a swap of two of them would be undone."""
    problem, order, swap = problem_of(6), list(range(10)), annealing.SHARE_OF_SEVERAL
    assert annealing._propose_move(problem, order, 0, Given(0.0, swap, 0.0)) is None
    assert annealing._propose_move(problem, order, 4, Given(0.0, swap, 0.0)) == (4, [5, 4])


def test_codes_and_actions_are_the_same_orders() -> None:
    problem = problem_of(4)
    orders = sequential_orders(problem)
    assert problem.codes(problem.orders(orders)) == orders
