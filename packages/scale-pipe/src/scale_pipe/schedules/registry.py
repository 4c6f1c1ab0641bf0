"""The schedules that have a name, and how each is made for a number of ranks and micro-batches."""

from __future__ import annotations

from collections.abc import Callable

from scale_pipe.integers import check_positive
from scale_pipe.schedules.classic import gpipe, interleaved_1f1b, looped_breadth_first, one_forward_one_backward
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.validate import validate
from scale_pipe.schedules.zero_bubble import dual_pipe_v, v_half, v_min, zb_h1, zb_v

SOLVE = "solve"


_LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "interleaved_1f1b": interleaved_1f1b,
    "looped_breadth_first": looped_breadth_first,
}


_ONE_STAGE: dict[str, Callable[[int, int], Schedule]] = {"1f1b": one_forward_one_backward, "zb_h1": zb_h1}


_TWO_STAGES: dict[str, Callable[[int, int], Schedule]] = {
    "zb_v": zb_v,
    "v_half": v_half,
    "v_min": v_min,
    "dual_pipe_v": dual_pipe_v,
}


NAMES = (*_LOOPED, *_ONE_STAGE, *_TWO_STAGES, SOLVE)
"""The schedules that have a name."""


def schedule_for(
    schedule: str | Schedule, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None
) -> Schedule:
    """Returns the schedule that is asked for; of "solve" the one that times are measured with.

    Args:
        schedule: A name, or a schedule.
        num_ranks: Of the group.
        num_micro_batches: Of a step; a schedule that is given has its own number.
        stages_per_rank: None is what the schedule is made for: two in a V and where stages are interleaved, else one.

    Raises:
        TypeError: It is neither.
        ValueError: There is no such name; a number does not suit it; it can't run.
    """
    if isinstance(schedule, Schedule):
        if schedule.num_ranks != num_ranks:
            raise ValueError(
                f"schedule {schedule.name!r} has {schedule.num_ranks} ranks, but the group has {num_ranks}"
            )
        validate(schedule)
        return schedule
    if not isinstance(schedule, str):
        raise TypeError(
            f"expected a schedule or its name, but got {type(schedule).__name__}: one of {', '.join(NAMES)}"
        )
    name = schedule.lower().replace("-", "_")
    (num_micro_batches,) = check_positive(chunks=num_micro_batches)
    if stages_per_rank is not None:
        (stages_per_rank,) = check_positive(stages_per_rank=stages_per_rank)
    if name == SOLVE:
        name = {1: "zb_h1", 2: "zb_v"}.get(stages_per_rank or 2, "interleaved_1f1b")
    if name in _LOOPED:
        usual = 1 if name == "gpipe" else 2
        return _LOOPED[name](num_ranks, num_micro_batches, stages_per_rank or usual)
    for built, number in ((_ONE_STAGE, 1), (_TWO_STAGES, 2)):
        if name in built:
            if stages_per_rank not in (None, number):
                raise ValueError(
                    f"{schedule!r} has {number} stage{'s' * (number > 1)} on each rank, but there are to be "
                    f"{stages_per_rank}: take another number of stages, or one of {', '.join((*_LOOPED, SOLVE))}"
                )
            return built[name](num_ranks, num_micro_batches)
    raise ValueError(f"there is no schedule {schedule!r}; there are {', '.join(NAMES)}, or pass a Schedule of your own")
