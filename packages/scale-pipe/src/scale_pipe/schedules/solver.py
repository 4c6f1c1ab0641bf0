"""The solver: from measured costs and a memory cap to a placement and a schedule, with the proof of how good they are.

It starts from every classic schedule and from some hundred list schedules, anneals the best of each placement for a
short time, and the best of the results for the rest, until the proved lower bound is reached or the evaluations are
spent. It counts evaluations and not seconds, so the same input gives the same schedule
on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from typing import NamedTuple

from scale_pipe.schedules.annealing import Heat, Search, anneal
from scale_pipe.schedules.backbone import backbone_of, in_order
from scale_pipe.schedules.bounds import Bound, cap_in_stages, lower_bound
from scale_pipe.schedules.candidates import classic_schedules, fits, list_schedules, placements
from scale_pipe.schedules.costs import Costs
from scale_pipe.schedules.errors import MemoryCapError
from scale_pipe.schedules.placement import Placement, check_positive
from scale_pipe.schedules.problem import ROUNDING, Codes, Problem
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import Simulation, simulate
from scale_pipe.schedules.solutions import read_solution, solution_key, write_solution
from scale_pipe.schedules.validation import caps_by_rank, validate
from scale_pipe.schedules.weave import weave

VISITS_AT_4_X_8 = 4_500_000
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


@dataclass(frozen=True)
class Solution:
    """What the solver has found; `print` says how good it is.

    Attributes:
        simulation: The schedule in time, under the costs.
        bound: What no schedule of this placement can beat under the memory cap.
        best_bound: The makespan that no schedule of any tried placement can beat.
        best_classic: The name and makespan of the best classic schedule that keeps the cap; None where none does.
        visits: How many actions were evaluated, in all.
    """

    simulation: Simulation
    bound: Bound
    best_bound: float
    best_classic: tuple[str, float] | None
    visits: int

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def makespan(self) -> float:
        """Its time."""
        return self.simulation.makespan

    @property
    def bubble(self) -> float:
        """The share of it in which the busiest rank is idle."""
        return self.simulation.bubble

    @property
    def gap(self) -> float:
        """By how much a better schedule could be faster at most, as a share of the bound; 0 is proved the best."""
        return max(0.0, self.makespan / self.best_bound - 1) if self.best_bound else 0.0

    def __str__(self) -> str:
        if self.best_classic is None:
            classic = "no classic schedule keeps the memory cap"
        else:
            name, makespan = self.best_classic
            classic = f"{name} takes {makespan:g} ({makespan / self.makespan - 1:+.2%})" if self.makespan else name
        proof = "proved to be the fastest" if self.gap < 1e-9 else f"at most {self.gap:.2%} above the fastest"
        return (
            f"{self.schedule.placement.shape} placement: makespan {self.makespan:g}, bubble {self.bubble:.2%}, "
            f"peak {max(self.simulation.peak_live):g} live micro-batches; {proof}\n"
            f"bound {self.bound.makespan:g}: {self.bound.reason}\n"
            f"best classic: {classic}"
        )


def solve(
    costs: Costs,
    num_ranks: int,
    num_micro_batches: int,
    *,
    memory_cap: float | Sequence[float] | None = None,
    placement: Placement | None = None,
    visits: int | None = None,
    cache: str | PathLike[str] | None = None,
) -> Solution:
    """Finds a placement and a schedule for measured costs.

    Args:
        costs: Times of each stage and link. A wave and a loop have other neighbours on other ranks: a link's time
            counts where its two stages stand on different ranks.
        num_ranks: P; there are at least as many stages.
        num_micro_batches: M.
        memory_cap: Live micro-batches on a rank, in model equivalents, for all ranks or by rank; None for no limit.
        placement: Which rank holds which stage, if that is given; None tries a wave (V) and a loop.
        visits: How many actions may be evaluated; None for 4.5 million with 4 x 8, and in proportion to (P M)^1.5.
        cache: A JSON file that keeps solutions by their inputs: read first, and added to. None keeps nothing.

    Returns:
        Never slower than any classic schedule of this placement, or of any if none is given, that keeps the cap.

    Raises:
        MemoryCapError: Less than one micro-batch on each stage of a rank fits.
        ValueError: A number is not positive, there are fewer stages than ranks, the placement has other numbers, or the
            cache is no file of solutions.
        OSError: The cache cannot be read or written.
    """
    check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    if visits is None:
        visits = round(VISITS_AT_4_X_8 * (num_ranks * num_micro_batches / 32) ** 1.5)
    check_positive(visits=visits)
    if costs.num_stages < num_ranks:
        raise ValueError(f"each rank needs a stage: {num_ranks} ranks, but costs for {costs.num_stages} stages")
    caps = caps_by_rank(memory_cap, num_ranks)
    tried = placements(num_ranks, costs.num_stages) if placement is None else (placement,)
    for one in tried:
        costs.check_for(one)
        if one.num_ranks != num_ranks:
            raise ValueError(f"num_ranks is {num_ranks}, but the placement has {one.num_ranks} ranks")
        _check_caps(one, caps, num_micro_batches)
    bounds = {one: lower_bound(one, num_micro_batches, costs, caps) for one in tried}
    best_bound = min(bound.makespan for bound in bounds.values())
    classics = [
        schedule
        for schedule in classic_schedules(num_ranks, costs.num_stages, num_micro_batches)
        if schedule.placement in tried and fits(schedule, caps)
    ]
    times = [(simulate(schedule, costs).makespan, index) for index, schedule in enumerate(classics)]
    best_classic = (classics[min(times)[1]].name, min(times)[0]) if times else None

    key = solution_key(costs, num_micro_batches, caps, tried, visits)
    kept = None if cache is None else read_solution(cache, key)
    if kept is not None:
        schedule, spent = kept
    else:
        schedule, spent = _search(costs, num_micro_batches, caps, bounds, classics, visits)
        if cache is not None:
            write_solution(cache, key, schedule, spent)
    validate(schedule, memory_cap=caps)
    simulation = simulate(schedule, costs)
    return Solution(simulation, bounds[schedule.placement], best_bound, best_classic, spent)


def _check_caps(placement: Placement, caps: tuple[float, ...], num_micro_batches: int) -> None:
    for rank, stages in enumerate(placement.stages_of):
        if cap_in_stages(caps[rank], len(stages), num_micro_batches) < len(stages):
            raise MemoryCapError(
                f"one micro-batch on each of its {len(stages)} stages must fit, but memory_cap is {caps[rank]:g}; "
                "write memory_cap=1 or more, or make micro-batches smaller",
                rank,
            )


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


def _search(
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
    classic = [_one_by_one(problem), *(problem.codes(schedule.computes()) for schedule in classics)]
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


def _one_by_one(problem: Problem) -> Codes:
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
