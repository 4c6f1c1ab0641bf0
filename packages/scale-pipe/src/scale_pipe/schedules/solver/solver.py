"""The solver: from measured costs and a memory cap to a placement and a schedule, with the proof of how good they are.

It starts from every classic schedule and from some hundred list schedules, anneals the best of each placement for a
short time, and the best of the results for the rest, until the proved lower bound is reached or the visits are spent.
It counts visited actions and not seconds, so the same input gives the same schedule on any machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from scale_pipe.integers import check_positive, checked_arguments
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.registry import classic_schedules
from scale_pipe.schedules.schedule import MemoryCapError, Schedule
from scale_pipe.schedules.simulation import ScheduleSimulation, simulate
from scale_pipe.schedules.solver.bounds import Bound, cap_in_stages, lower_bound
from scale_pipe.schedules.solver.search import candidate_placements, keeps_caps, search_schedule
from scale_pipe.schedules.validate import caps_by_rank, validate

VISITS_AT_4_X_8 = 4_500_000
CACHE_FORMAT = 1
SOLVER = 2
"""Goes up whenever the solver would find another schedule for the same input, which discards older cache entries."""


@dataclass(frozen=True)
class Solution:
    """The solver's result; `print` says how good it is.

    Attributes:
        simulation: The schedule in time, under the costs.
        bound: The lower bound of this placement under the memory cap.
        best_bound: The lower bound of the makespan of all tried placements.
        best_classic: The name and makespan of the best classic schedule that keeps the cap; None where none does.
        visits: The number of evaluated actions.

    Examples:
        >>> from scale_pipe import Costs, solve
        >>> solution = solve(Costs.uniform(2), num_ranks=2, num_micro_batches=4, visits=100)
        >>> solution.simulation.schedule.num_micro_batches
        4

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """

    simulation: ScheduleSimulation
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
        """The schedule's time."""
        return self.simulation.makespan

    @property
    def bubble(self) -> float:
        """The share of the makespan in which the busiest rank is idle."""
        return self.simulation.bubble

    @property
    def gap(self) -> float:
        """The makespan above the best bound, as a share of it; 0 is proved to be the fastest."""
        return max(0.0, self.makespan / self.best_bound - 1) if self.best_bound else 0.0

    def __str__(self) -> str:
        if self.best_classic is None:
            classic = "no classic schedule keeps the memory cap"
        else:
            name, makespan = self.best_classic
            classic = f"{name} takes {makespan:g} ({makespan / self.makespan - 1:+.2%})" if self.makespan else name
        proof = "proved to be the fastest" if self.gap < 1e-9 else f"at most {self.gap:.2%} above the fastest"
        return (
            f"{self.schedule.placement.shape} placement: makespan {self.makespan:g}, bubble {self.bubble:.2%}, peak "
            f"{max(self.simulation.peak_live):g} live micro-batches; {proof}\nbound {self.bound.makespan:g}: "
            f"{self.bound.reason}\nbest classic: {classic}"
        )


@checked_arguments
def solve(
    costs: Costs,
    num_ranks: int,
    num_micro_batches: int,
    *,
    memory_cap: float | Sequence[float] | None = None,
    placement: StagePlacement | None = None,
    visits: int | None = None,
    cache: str | PathLike[str] | None = None,
) -> Solution:
    """Finds a placement and a schedule for measured costs.

    Args:
        costs: Times of each stage and link. A link's time counts where its two stages are on different ranks, which
            differs between a wave and a loop.
        num_ranks: P. The number of stages is at least P.
        num_micro_batches: M.
        memory_cap: Live micro-batches on a rank, in model equivalents, for all ranks or by rank; None for no limit.
        placement: The rank of each stage; None tries a wave (V) and a loop.
        visits: The number of actions that may be evaluated; None for 4.5 million with P = 4 and M = 8, and in
            proportion to (P M)^1.5.
        cache: A JSON file of solutions by their inputs, which is read first and added to; None caches nothing.

    Returns:
        A solution that is never slower than any classic schedule of the placement, or of any placement if none is
        given, that keeps the cap.

    Raises:
        MemoryCapError: Less than one micro-batch on each stage of a rank fits.
        ValueError: A number is not positive, there are fewer stages than ranks, the placement has other numbers, or the
            cache is not a file of solutions.
        OSError: The cache cannot be read or written.

    Examples:
        >>> from scale_pipe import Costs, solve
        >>> costs = Costs(forward=(1.0, 3.0), input_gradient=(1.0, 3.0), weight_gradient=(1.0, 3.0), link=(0.1,))
        >>> solution = solve(costs, num_ranks=2, num_micro_batches=4, visits=100)
        >>> solution.simulation.makespan >= solution.best_bound
        True

    See also: [the guide to pipeline schedules](../guides/pipe.md#which-schedule).
    """
    num_ranks, num_micro_batches = check_positive(num_ranks=num_ranks, num_micro_batches=num_micro_batches)
    if visits is None:
        visits = round(VISITS_AT_4_X_8 * (num_ranks * num_micro_batches / 32) ** 1.5)
    (visits,) = check_positive(visits=visits)
    if costs.num_stages < num_ranks:
        raise ValueError(f"each rank needs a stage: {num_ranks} ranks, but costs for {costs.num_stages} stages")
    caps = caps_by_rank(memory_cap, num_ranks)
    tried = candidate_placements(num_ranks, costs.num_stages) if placement is None else (placement,)
    for one in tried:
        _check_placement(one, costs, num_ranks, caps, num_micro_batches)
    bounds = {one: lower_bound(one, num_micro_batches, costs, caps) for one in tried}
    best_bound = min(bound.makespan for bound in bounds.values())
    classics = [
        schedule
        for schedule in classic_schedules(num_ranks, costs.num_stages, num_micro_batches)
        if schedule.placement in tried and keeps_caps(schedule, caps)
    ]
    times = [(schedule.name, simulate(schedule, costs).makespan) for schedule in classics]
    best_classic = min(times, key=lambda named: named[1], default=None)
    key = _cache_key(costs, num_micro_batches, caps, tried, visits)
    solution = None if cache is None else _read_cache(Path(cache)).get(key)
    if solution is not None:
        schedule, spent = Schedule.from_json(solution["schedule"]), int(solution["visits"])
    else:
        schedule, spent = search_schedule(costs, num_micro_batches, caps, bounds, classics, visits)
        if cache is not None:
            _add_to_cache(Path(cache), key, {"schedule": schedule.to_json(), "visits": spent})
    validate(schedule, memory_cap=caps)
    simulation = simulate(schedule, costs)
    return Solution(simulation, bounds[schedule.placement], best_bound, best_classic, spent)


def _check_placement(
    placement: StagePlacement, costs: Costs, num_ranks: int, caps: tuple[float, ...], num_micro_batches: int
) -> None:
    costs.check_for(placement)
    if placement.num_ranks != num_ranks:
        raise ValueError(f"num_ranks is {num_ranks}, but the placement has {placement.num_ranks} ranks")
    for rank, stages in enumerate(placement.stages_of):
        if cap_in_stages(caps[rank], len(stages), num_micro_batches) < len(stages):
            raise MemoryCapError(
                f"one micro-batch on each of its {len(stages)} stages must fit, but memory_cap is {caps[rank]:g}; "
                "write memory_cap=1 or more, or make micro-batches smaller",
                rank,
            )


def _cache_key(
    costs: Costs, num_micro_batches: int, caps: Sequence[float], placements: Sequence[StagePlacement], visits: int
) -> str:
    """Returns the digest of all inputs of a search."""
    inputs = [SOLVER, asdict(costs), num_micro_batches, list(caps), [one.rank_of for one in placements], visits]
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


def _read_cache(path: Path) -> dict[str, Any]:
    """Returns the solutions in a cache file by their keys; raises `ValueError` if it holds something else."""
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != CACHE_FORMAT:
            raise ValueError(f"format {content['format']!r}, not {CACHE_FORMAT}")
        return dict(content["solutions"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no solutions of the solver ({error}); name another file as cache=") from error


def _add_to_cache(path: Path, key: str, entry: dict[str, Any]) -> None:
    """Adds a solution to the cache file, which is replaced at once, so that a reader never sees half of it."""
    content = {"format": CACHE_FORMAT, "solutions": {**_read_cache(path), key: entry}}
    with NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False, encoding="utf-8") as file:
        file.write(json.dumps(content, indent=1) + "\n")
    Path(file.name).replace(path)
