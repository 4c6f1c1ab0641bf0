"""The solver's search: many beginnings, of which the best are annealed in rounds until the evaluations are spent.

Classic and list schedules begin, whole and as backbones. In each round the best of each placement go on; what can no
longer win is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.lowering import weave
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.solver.annealing import Heat, Search, anneal
from scale_pipe.schedules.solver.bounds import Bound, cap_in_stages
from scale_pipe.schedules.solver.candidates import list_schedules
from scale_pipe.schedules.solver.partial_order import backbone_of, in_order
from scale_pipe.schedules.solver.problem import ROUNDING, Codes, Problem

LIST_SCHEDULE_VISITS = 4
"""What a list schedule costs, in evaluations of an action for each of its actions."""
LIST_SCHEDULES = 0.1
"""The share of the evaluations that list schedules may take."""
PATIENCE = (1.0, 0.6)
"""In turns: which of them is better depends on the costs."""


class Round(NamedTuple):
    """Some searches, each of which goes on from one of the best results of the round before.

    Attributes:
        share: Of the evaluations.
        num_of_a_kind: How many go on from each placement, whole and backbones apart.
        num_runs: How many there are in all.
        backbones: How hot those over backbones are.
        large_backbones: The same where there are more than `MANY` actions.
        whole: How hot those over whole orders are.
    """

    share: float
    num_of_a_kind: int
    num_runs: int
    backbones: Heat
    large_backbones: Heat
    whole: Heat

    def heat(self, problem: Problem, is_whole: bool) -> Heat:
        """Returns how hot a search is.

        Args:
            problem: What is searched.
            is_whole: Whether over whole orders.
        """
        if is_whole:
            return self.whole
        return self.large_backbones if len(problem.durations) > MANY else self.backbones


MANY = 400
HOT, COOL, COLD = Heat(0.15, 0.065), Heat(0.1, 0.02), Heat(0.05, 0.01)
ROUNDS = (
    Round(0.15, 2, 8, backbones=HOT, large_backbones=COOL, whole=COLD),
    Round(0.5, 1, 2, backbones=Heat(0.15, 0.02), large_backbones=Heat(0.15, 0.02), whole=COLD),
    Round(0.35, 1, 1, backbones=HOT, large_backbones=HOT, whole=COLD),
)
"""Found by trying, on the rows of benchmarks/pipeline_bubbles.py: other costs may be served better by others. A short
search over many actions must begin cool, or it ends before it has cooled down."""


class _Start(NamedTuple):
    """Orders that a search may go on from.

    Attributes:
        makespan: Their own; the smallest goes first.
        placement: The number of their placement; ties fall to the first.
        is_whole: Whether they hold weight gradients.
        number: How many came before.
        orders: By rank.
    """

    makespan: float
    placement: int
    is_whole: bool
    number: int
    orders: Codes


def search_schedule(
    costs: Costs,
    num_micro_batches: int,
    caps: tuple[float, ...],
    bounds: dict[Placement, Bound],
    classics: list[Schedule],
    visits: int,
) -> tuple[Schedule, int]:
    """Returns the best schedule that the evaluations suffice for, and how many were spent."""
    # Times are scaled so that comparisons of times don't depend on their unit.
    unit = sum(map(costs.work, range(costs.num_stages))) / costs.num_stages or 1.0
    scaled = Costs(*(tuple(time / unit for time in getattr(costs, name)) for name in costs.__dataclass_fields__))
    searches: list[Search] = []
    starts: list[_Start] = []
    for number, (placement, bound) in enumerate(bounds.items()):
        cap = [
            cap_in_stages(cap, len(stages), num_micro_batches)
            for cap, stages in zip(caps, placement.stages_of, strict=True)
        ]
        searches.append(Search(Problem.of(placement, num_micro_batches, scaled, cap), bound.makespan / unit))
        own = [schedule for schedule in classics if schedule.placement == placement]
        starts += _starts(searches[-1], own, number, round(LIST_SCHEDULES * visits) // len(bounds))
    left = visits - sum(search.visits for search in searches)
    for turn, one in enumerate(ROUNDS):
        able = [start for start in starts if _can_win(start, searches)]
        chosen = _best_of_each_kind(able, one.num_of_a_kind)[: one.num_runs]
        results = []
        for run, start in enumerate(chosen):
            if _can_win(start, searches):
                search = searches[start.placement]
                makespan, orders = anneal(
                    search,
                    start.orders,
                    round(one.share * left) // len(chosen),
                    heat=one.heat(search.problem, start.is_whole),
                    patience=PATIENCE[run % len(PATIENCE)],
                    seed=turn,
                )
                results.append(start._replace(makespan=makespan, number=run, orders=orders))
        # Those that wait stay: a placement that goes on reaches its bound at times, and another may still be better.
        starts = results + ([start for start in starts if start not in chosen] if turn else [])
    search = min(searches, key=lambda search: search.makespan)
    problem = search.problem
    schedule = weave("Solved", problem.placement, num_micro_batches, problem.orders(search.codes))
    return schedule, sum(search.visits for search in searches)


def _starts(search: Search, classics: list[Schedule], placement: int, limit: int) -> list[_Start]:
    """Tries all classic and many list schedules, and returns them whole and as backbones, each once."""
    problem = search.problem
    found: dict[tuple[tuple[int, ...], ...], tuple[float, int, Codes]] = {}
    classic = [one_by_one(problem), *(problem.codes(schedule.computes()) for schedule in classics)]
    for codes in chain(classic, _spared(search, limit)):
        whole = [in_order(order, problem.num_micro_batches) for order in codes]
        for orders in (whole, backbone_of(problem, whole)):
            timing = search.time(orders)
            assert timing is not None, "classic and list schedules never deadlock, nor do their backbones"
            found.setdefault(tuple(map(tuple, orders)), (timing.makespan, len(found), orders))
        if search.done:
            break
    return [
        _Start(makespan, placement, problem.is_whole(orders), number, orders)
        for makespan, number, orders in found.values()
    ]


def _can_win(start: _Start, searches: list[Search]) -> bool:
    """Returns whether a schedule of this placement could still be the best of all."""
    return searches[start.placement].goal < min(search.makespan for search in searches) - ROUNDING


def _best_of_each_kind(starts: list[_Start], number: int) -> list[_Start]:
    """Returns the best few of each placement, whole or not, the best of all first."""
    chosen: list[_Start] = []
    for start in sorted(starts):
        kind = start.placement, start.is_whole
        if sum((other.placement, other.is_whole) == kind for other in chosen) < number:
            chosen.append(start)
    return chosen


def one_by_one(problem: Problem) -> Codes:
    """Returns the orders that do one micro-batch after another: slow, but they run under any cap."""
    codes: Codes = [[] for _ in problem.caps]
    last = problem.placement.num_stages - 1
    for micro_batch in range(problem.num_micro_batches):
        for kind in range(3):
            for stage in range(last + 1) if kind == 0 else range(last, -1, -1):
                code = kind * problem.size + stage * problem.num_micro_batches + micro_batch
                codes[problem.owners[code]].append(code)
    return codes


def _spared(search: Search, limit: int) -> Iterator[Codes]:
    """Yields the list schedules that a part of the evaluations suffices for."""
    for _, codes in list_schedules(search.problem):
        search.evaluator.visits += LIST_SCHEDULE_VISITS * len(search.problem.durations)
        yield codes
        if search.visits >= limit:
            return
