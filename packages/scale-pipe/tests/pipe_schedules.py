"""Every builder with the sizes it is tried at, and small schedules that are wrong on purpose."""

from collections.abc import Callable
from itertools import accumulate

from scale_pipe import Schedule
from scale_pipe.schedules.classic import gpipe, interleaved_1f1b, looped_breadth_first, one_forward_one_backward
from scale_pipe.schedules.list_scheduling import Codes, Problem
from scale_pipe.schedules.zero_bubble import dual_pipe_v, v_half, v_min, zb_h1, zb_v

BUILDERS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "gpipe, 2 stages": lambda ranks, batches: gpipe(ranks, batches, 2),
    "1f1b": one_forward_one_backward,
    "interleaved, 2 stages": interleaved_1f1b,
    "interleaved, 3 stages": lambda ranks, batches: interleaved_1f1b(ranks, batches, 3),
    "breadth-first, 2 stages": looped_breadth_first,
    "breadth-first, 3 stages": lambda ranks, batches: looped_breadth_first(ranks, batches, 3),
    "zb-h1": zb_h1,
    "zb-v": zb_v,
    "v-half": v_half,
    "v-min": v_min,
    "dualpipe-v": dual_pipe_v,
}
CAPS: dict[str, Callable[[int], float]] = {
    "1f1b": lambda ranks: ranks,
    "zb-h1": lambda ranks: ranks,
    "zb-v": lambda ranks: ranks,
    "v-half": lambda ranks: (ranks + 2) // 2,
    "v-min": lambda ranks: (ranks + 4) // 3,
    "dualpipe-v": lambda ranks: ranks + 0.5,
}
"""How many micro-batches may be live, in model equivalents, by the number of ranks."""


def changed(schedule: Schedule, rank: int, change: Callable[[list], None]) -> Schedule:
    """Returns a schedule in which one rank's list was changed in place."""
    actions = [list(row) for row in schedule.actions]
    change(actions[rank])
    return Schedule(schedule.name, schedule.placement, schedule.num_micro_batches, tuple(map(tuple, actions)))


def keeps_caps(problem: Problem, codes: Codes) -> bool:
    """Returns whether complete orders keep the cap of each rank at all times."""
    return all(
        max(accumulate((code < problem.size) - (code >= 2 * problem.size) for code in order)) <= cap
        for order, cap in zip(codes, problem.caps, strict=True)
    )
