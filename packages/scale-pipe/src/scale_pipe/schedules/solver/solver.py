"""The solver: from measured costs and a memory cap to a placement and a schedule, with the proof of how good they are.

It starts from every classic schedule and from some hundred list schedules, anneals the best of each placement for a
short time, and the best of the results for the rest, until the proved lower bound is reached or the evaluations are
spent. It counts evaluations and not seconds, so the same input gives the same schedule
on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike

from scale_pipe.integers import check_positive
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import MemoryCapError
from scale_pipe.schedules.simulation import simulate
from scale_pipe.schedules.solver.bounds import cap_in_stages, lower_bound
from scale_pipe.schedules.solver.candidates import classic_schedules, fits, placements
from scale_pipe.schedules.solver.search import search_schedule
from scale_pipe.schedules.solver.solution import Solution, read_solution, solution_key, write_solution
from scale_pipe.schedules.validate import caps_by_rank, validate

VISITS_AT_4_X_8 = 4_500_000


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
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    if visits is None:
        visits = round(VISITS_AT_4_X_8 * (num_ranks * num_micro_batches / 32) ** 1.5)
    (visits,) = check_positive(visits=visits)
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
        schedule, spent = search_schedule(costs, num_micro_batches, caps, bounds, classics, visits)
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
