"""Where a search starts: the classic schedules, and the list schedules of simple rules."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from scale_pipe.schedules.classic import gpipe, interleaved_1f1b, looped_breadth_first, one_forward_one_backward
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import peak_live
from scale_pipe.schedules.solver.list_scheduling import list_schedule
from scale_pipe.schedules.solver.problem import Codes, Problem, works
from scale_pipe.schedules.zero_bubble import dual_pipe_v, rules, v_half, v_min, zb_h1, zb_v

FORWARDS = (0.6, 0.8, 1.0, 1.2)
INPUT_GRADIENTS = (0.8, 1.0, 1.2, 1.4, 1.6, 1.8, 2.0)
WEIGHT_GRADIENTS = (0.2, 0.4, 0.6, 0.8, 1.0)


def classic_schedules(num_ranks: int, num_stages: int, num_micro_batches: int) -> Iterator[Schedule]:
    """Yields the schedules with a name that have this number of stages, on whatever placement they define.

    Args:
        num_ranks: P.
        num_stages: A multiple of P, or none has so many.
        num_micro_batches: M.
    """
    stages_per_rank, rest = divmod(num_stages, num_ranks)
    if rest or not stages_per_rank:
        return
    yield gpipe(num_ranks, num_micro_batches, stages_per_rank)
    if stages_per_rank == 1:
        yield one_forward_one_backward(num_ranks, num_micro_batches)
        yield zb_h1(num_ranks, num_micro_batches)
    else:
        yield looped_breadth_first(num_ranks, num_micro_batches, stages_per_rank)
        yield interleaved_1f1b(num_ranks, num_micro_batches, stages_per_rank)
    if stages_per_rank == 2:
        for build in (zb_v, v_half, v_min, dual_pipe_v):
            yield build(num_ranks, num_micro_batches)


def fits(schedule: Schedule, caps: tuple[float, ...]) -> bool:
    """Returns whether a schedule keeps the caps.

    Args:
        schedule: Any.
        caps: By rank, live micro-batches in model equivalents.
    """
    return all(peak <= cap + 1e-9 for peak, cap in zip(peak_live(schedule), caps, strict=True))


def list_schedules(problem: Problem) -> Iterator[tuple[float, Codes]]:
    """Yields (time under the leading costs, orders): each rule, led by the true costs and by many others.

    Which order a rule gives depends on the times that it is led by, and the best order under the true costs seldom
    comes from these. So the kinds' times are varied, while their ratios between stages stay.

    Args:
        problem: With the true costs.
    """
    costs = problem.costs
    means = [sum(times) / len(times) for times in (costs.forward, costs.input_gradient, costs.weight_gradient)]
    leading = [(1.0, 1.0, 1.0)]
    if all(means):
        leading += [
            (there, back * means[0] / means[1], weight * means[0] / means[2])
            for there, back, weight in product(FORWARDS, INPUT_GRADIENTS, WEIGHT_GRADIENTS)
        ]
    for forward, input_gradient, weight_gradient in leading:
        led = Costs(
            tuple(time * forward for time in costs.forward),
            tuple(time * input_gradient for time in costs.input_gradient),
            tuple(time * weight_gradient for time in costs.weight_gradient),
            costs.link,
        )
        led_problem = with_costs(problem, led)
        for urgencies, patience in rules(led_problem):
            codes, makespan = list_schedule(led_problem, urgencies, patience)
            if makespan < float("inf"):
                yield makespan, codes


def with_costs(problem: Problem, costs: Costs) -> Problem:
    """Returns a problem with other times of its stages.

    Args:
        problem: Any.
        costs: Of as many stages, with the same links.
    """
    by_kind = (costs.forward, costs.input_gradient, costs.weight_gradient)
    durations = [time for times in by_kind for time in times for _ in range(problem.num_micro_batches)]
    work = works(problem.placement, problem.num_micro_batches, costs)
    return replace(problem, costs=costs, durations=durations, works=work)


def placements(num_ranks: int, num_stages: int) -> tuple[Placement, ...]:
    """Returns the placements that are tried: wave (a V with two stages per rank) and loop; cut short if need be.

    Args:
        num_ranks: P.
        num_stages: At least P.
    """
    turns = -(-num_stages // num_ranks)
    whole = (Placement.wave(num_ranks, turns), Placement.loop(num_ranks, turns))
    return tuple(dict.fromkeys(Placement(placement.rank_of[:num_stages]) for placement in whole))
