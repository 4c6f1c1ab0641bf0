"""The solver's search: many candidate orders; the best are annealed in rounds until the visits are spent.

Classic and list schedules are the first candidates, as complete and as partial orders. In each round the best of each
placement go on; candidates that can no longer win are dropped.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from math import inf
from typing import NamedTuple

from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.list_scheduling import ROUNDING, Codes, Problem, list_schedule
from scale_pipe.schedules.lowering import build_schedule
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import peak_live
from scale_pipe.schedules.solver.annealing import Temperatures, anneal
from scale_pipe.schedules.solver.bounds import Bound, cap_in_stages
from scale_pipe.schedules.solver.partial_order import Search, drop_weight_gradients, renumber_micro_batches
from scale_pipe.schedules.zero_bubble import priority_rules

FORWARD_FACTORS = (0.6, 0.8, 1.0, 1.2)
INPUT_GRADIENT_FACTORS = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
WEIGHT_GRADIENT_FACTORS = (0.2, 0.4, 0.6, 0.8, 1.0)
"""Of the times that list schedules assume."""
LIST_SCHEDULE_VISITS = 4
"""The cost of a list schedule, in visits for each of its actions."""
LIST_SCHEDULES = 0.1
"""The share of the visits that list schedules may take."""
PATIENCE = (1.0, 0.6)
"""In turns: which of them is better depends on the costs."""
MANY_ACTIONS = 400


class Round(NamedTuple):
    """Some searches that go on from the best results of the round before."""

    share: float  # Of the visits.
    runs_of_a_kind: int  # How many go on from each placement, complete and partial orders apart.
    num_runs: int  # In all.
    partial: Temperatures
    large_partial: Temperatures  # Of partial orders where there are more than `MANY_ACTIONS`.
    complete: Temperatures

    def temperatures(self, problem: Problem, is_complete: bool) -> Temperatures:
        """Returns those for complete or partial orders of a problem."""
        if is_complete:
            return self.complete
        return self.large_partial if len(problem.durations) > MANY_ACTIONS else self.partial


HOT, COOL, COLD = Temperatures(0.15, 0.065), Temperatures(0.1, 0.02), Temperatures(0.05, 0.01)
ROUNDS = (
    Round(0.15, 2, 8, partial=HOT, large_partial=COOL, complete=COLD),
    Round(0.5, 1, 2, partial=Temperatures(0.15, 0.02), large_partial=Temperatures(0.15, 0.02), complete=COLD),
    Round(0.35, 1, 1, partial=HOT, large_partial=HOT, complete=COLD),
)
"""Tuned on the rows of benchmarks/pipeline_bubbles.py: other costs may be served better by others. A short search over
many actions must start cool, or it ends before it has cooled down."""


class _Candidate(NamedTuple):
    """Orders from which a search may go on; the smallest makespan goes first, and ties by the next fields."""

    makespan: float
    placement: int  # Its number.
    is_complete: bool
    number: int  # How many came before.
    orders: Codes


def search_schedule(
    costs: Costs,
    num_micro_batches: int,
    caps: tuple[float, ...],
    bounds: dict[StagePlacement, Bound],
    classics: list[Schedule],
    visits: int,
) -> tuple[Schedule, int]:
    """Returns the best schedule that the visits suffice for, and how many were spent."""
    # Times are scaled so that comparisons of times don't depend on their unit.
    unit = sum(map(costs.stage_time, range(costs.num_stages))) / costs.num_stages or 1.0
    scaled = Costs(*(tuple(time / unit for time in getattr(costs, name)) for name in costs.__dataclass_fields__))
    searches: list[Search] = []
    candidates: list[_Candidate] = []
    for number, (placement, bound) in enumerate(bounds.items()):
        pairs = zip(caps, placement.stages_of, strict=True)
        stage_caps = [cap_in_stages(cap, len(stages), num_micro_batches) for cap, stages in pairs]
        problem = Problem.build(placement, num_micro_batches, scaled, stage_caps)
        searches.append(Search(problem, bound.makespan / unit))
        same_placement = [schedule for schedule in classics if schedule.placement == placement]
        candidates += _first_candidates(
            searches[-1], same_placement, number, round(LIST_SCHEDULES * visits) // len(bounds)
        )
    left = visits - sum(search.visits for search in searches)
    for number, one in enumerate(ROUNDS):
        able = [candidate for candidate in candidates if _can_win(candidate, searches)]
        chosen = _best_of_each_kind(able, one.runs_of_a_kind)[: one.num_runs]
        results = _anneal_each(searches, chosen, one, round(one.share * left), seed=number)
        # Others are kept: a placement that goes on may reach its bound, and another one may still be better.
        candidates = results + ([other for other in candidates if other not in chosen] if number else [])
    search = min(searches, key=lambda search: search.makespan)
    problem = search.problem
    schedule = build_schedule("Solved", problem.placement, num_micro_batches, problem.orders(search.codes))
    return schedule, sum(search.visits for search in searches)


def _first_candidates(search: Search, classics: list[Schedule], placement: int, limit: int) -> list[_Candidate]:
    """Evaluates classic and list schedules; returns their complete and partial orders, each once."""
    problem = search.problem
    candidates: dict[tuple[tuple[int, ...], ...], _Candidate] = {}
    classic = [sequential_orders(problem), *(problem.codes(schedule.compute_actions()) for schedule in classics)]
    for codes in chain(classic, _list_schedules(search, limit)):
        complete = [renumber_micro_batches(order, problem.num_micro_batches) for order in codes]
        for orders in (complete, drop_weight_gradients(problem, complete)):
            timing = search.evaluate(orders)
            assert timing is not None, "classic and list schedules never deadlock, nor do their partial orders"
            candidate = _Candidate(timing.makespan, placement, orders is complete, len(candidates), orders)
            candidates.setdefault(tuple(map(tuple, orders)), candidate)
        if search.done:
            break
    return list(candidates.values())


def _anneal_each(
    searches: list[Search], chosen: list[_Candidate], one: Round, visits: int, seed: int
) -> list[_Candidate]:
    """Anneals the chosen candidates, as long as they can win, and returns the results."""
    results = []
    for run, candidate in enumerate(chosen):
        if _can_win(candidate, searches):
            search = searches[candidate.placement]
            makespan, orders = anneal(
                search,
                candidate.orders,
                visits // len(chosen),
                temperatures=one.temperatures(search.problem, candidate.is_complete),
                patience=PATIENCE[run % len(PATIENCE)],
                seed=seed,
            )
            results.append(candidate._replace(makespan=makespan, number=run, orders=orders))
    return results


def _can_win(candidate: _Candidate, searches: list[Search]) -> bool:
    """Returns whether a schedule of this placement could still be the best of all."""
    return searches[candidate.placement].goal < min(search.makespan for search in searches) - ROUNDING


def _best_of_each_kind(candidates: list[_Candidate], number: int) -> list[_Candidate]:
    """Returns the best few of each placement, complete or partial, the best of all first."""
    chosen: list[_Candidate] = []
    for candidate in sorted(candidates):
        kind = candidate.placement, candidate.is_complete
        if sum((other.placement, other.is_complete) == kind for other in chosen) < number:
            chosen.append(candidate)
    return chosen


def sequential_orders(problem: Problem) -> Codes:
    """Returns the orders that do one micro-batch after another: slow, but they run under any cap."""
    codes: Codes = [[] for _ in problem.caps]
    stages = range(problem.placement.num_stages)
    for micro_batch in range(problem.num_micro_batches):
        for kind in range(3):
            for stage in reversed(stages) if kind else stages:
                code = kind * problem.size + stage * problem.num_micro_batches + micro_batch
                codes[problem.owners[code]].append(code)
    return codes


def keeps_caps(schedule: Schedule, caps: tuple[float, ...]) -> bool:
    """Returns whether a schedule keeps caps, by rank, of live micro-batches in model equivalents."""
    return all(peak <= cap + 1e-9 for peak, cap in zip(peak_live(schedule), caps, strict=True))


def _list_schedules(search: Search, limit: int) -> Iterator[Codes]:
    """Yields the orders of each priority rule under the true costs and under many others, up to a limit of visits.

    The order that a rule gives depends on the assumed times, and the best order under the true costs seldom comes from
    these. So the kinds' times are varied, while their ratios between stages stay.
    """
    problem, costs = search.problem, search.problem.costs
    by_kind = (costs.forward, costs.input_gradient, costs.weight_gradient)
    means = [sum(times) / len(times) for times in by_kind]
    factors = [(1.0, 1.0, 1.0)]
    if all(means):
        factors += [
            (forward, gradient * means[0] / means[1], weight * means[0] / means[2])
            for forward, gradient, weight in product(FORWARD_FACTORS, INPUT_GRADIENT_FACTORS, WEIGHT_GRADIENT_FACTORS)
        ]
    for scale in factors:
        pairs = zip(by_kind, scale, strict=True)
        forward, gradient, weight = (tuple(time * factor for time in times) for times, factor in pairs)
        assumed = replace(problem, costs=Costs(forward, gradient, weight, costs.link))
        for priorities, patience in priority_rules(assumed):
            codes, makespan = list_schedule(assumed, priorities, patience)
            if makespan < inf:
                search.visits += LIST_SCHEDULE_VISITS * len(problem.durations)
                yield codes
                if search.visits >= limit:
                    return


def candidate_placements(num_ranks: int, num_stages: int) -> tuple[StagePlacement, ...]:
    """Returns the placements that are tried: wave (a V with two stages per rank) and loop, truncated to the stages."""
    turns = -(-num_stages // num_ranks)
    full = (StagePlacement.wave(num_ranks, turns), StagePlacement.loop(num_ranks, turns))
    return tuple(dict.fromkeys(StagePlacement(placement.rank_of[:num_stages]) for placement in full))
