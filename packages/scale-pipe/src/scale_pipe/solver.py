"""The solver: from measured costs and a memory cap to a placement and a schedule, with the proof of how good they are.

It starts from every classic schedule and from some hundred list schedules, takes the best of them, and searches from
there: first over urgencies, then over orders, in turns, until the proved lower bound is reached or the evaluations
are spent. It counts evaluations and not seconds, so the same input gives the same schedule on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike

from scale_pipe.annealing import Search, anneal_orders, anneal_urgencies
from scale_pipe.bounds import Bound, cap_in_stages, lower_bound
from scale_pipe.candidates import classic_schedules, fits, list_schedules, placements
from scale_pipe.costs import Costs
from scale_pipe.errors import MemoryCapError
from scale_pipe.placement import Placement, check_positive
from scale_pipe.problem import ROUNDING, Codes, Problem
from scale_pipe.schedule import Schedule
from scale_pipe.simulation import Simulation, simulate
from scale_pipe.solutions import read_solution, solution_key, write_solution
from scale_pipe.validation import caps_by_rank, validate
from scale_pipe.weave import weave

VISITS_AT_4_X_8 = 20_000_000


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
        visits: How many actions may be evaluated; None for 20 million with 4 x 8, and in proportion to (P M)^1.5.
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
    goal = min(bound.makespan for bound in bounds.values()) / unit
    searches, starts = [], []
    for placement, bound in bounds.items():
        cap = [
            cap_in_stages(cap, len(stages), num_micro_batches)
            for cap, stages in zip(caps, placement.stages_of, strict=True)
        ]
        search = Search(Problem.of(placement, num_micro_batches, scaled, cap), bound.makespan / unit, visits)
        starts.append(_start(search, [schedule for schedule in classics if schedule.placement == placement]))
        searches.append(search)
    spent = sum(search.visits for search in searches)
    best = min(range(len(searches)), key=lambda index: searches[index].makespan)
    if searches[best].makespan > goal + ROUNDING:
        # A part goes to each placement that could still win, and the rest to the one that leads then.
        trial = max(visits - spent, 0) // 5
        for index, search in enumerate(searches):
            if search.goal < searches[best].makespan - ROUNDING:
                search.limit = search.visits + trial
                anneal_orders(search, starts[index], trial // 3, seed=0)
                if search.is_large:
                    anneal_urgencies(search, starts[index], trial // 3, seed=0)
                anneal_orders(search, search.codes, trial // 3, seed=1)
        best = min(range(len(searches)), key=lambda index: searches[index].makespan)
        can_win = [search for search in searches if search.goal < searches[best].makespan - ROUNDING]
        if can_win:
            search = min(can_win, key=lambda search: search.makespan)
            left = max(visits - sum(search.visits for search in searches), 0)
            start = starts[searches.index(search)]
            search.limit = search.visits + left
            if search.is_large:
                anneal_orders(search, start, left // 4, seed=2)
                anneal_urgencies(search, search.codes, left // 4, seed=2)
                anneal_orders(search, search.codes, left // 4, seed=3)
            anneal_orders(search, start, search.limit - search.visits, seed=3)
        best = min(range(len(searches)), key=lambda index: searches[index].makespan)
    search = searches[best]
    problem = search.problem
    schedule = weave("Solved", problem.placement, num_micro_batches, problem.orders(search.codes))
    return schedule, sum(search.visits for search in searches)


def _start(search: Search, classics: list[Schedule]) -> Codes:
    """Tries all classic and all list schedules, and returns the best."""
    own = [search.problem.codes(schedule.computes()) for schedule in classics]
    limit = search.visits + search.limit // 4
    for codes in [_one_by_one(search.problem), *own, *_spared(search, limit)]:
        times = search.time(codes)
        assert times is not None, "classic schedules and list schedules never deadlock"
        if search.makespan <= search.goal + ROUNDING:
            break
    return search.codes


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


def _spared(search: Search, limit: int) -> list[Codes]:
    """Returns the list schedules that a part of the evaluations suffices for, without repetitions."""
    found: dict[tuple[tuple[int, ...], ...], Codes] = {}
    for _, codes in list_schedules(search.problem):
        found.setdefault(tuple(map(tuple, codes)), codes)
        search.visits += Search.LIST_SCHEDULE_VISITS * len(search.problem.durations)
        if search.visits >= limit:
            break
    return list(found.values())
