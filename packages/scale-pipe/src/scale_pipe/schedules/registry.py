"""The schedules by name, as `DistributedPipe` and `balance_by_makespan` take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from scale_pipe.integers import check_positive
from scale_pipe.schedules.classic import gpipe, interleaved_1f1b, looped_breadth_first, one_forward_one_backward
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.validate import validate
from scale_pipe.schedules.zero_bubble import dual_pipe_v, v_half, v_min, zb_h1, zb_v

SOLVE = "solve"

_LOOPED: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "looped_breadth_first": looped_breadth_first,
    "interleaved_1f1b": interleaved_1f1b,
}
_FIXED: dict[str, tuple[Callable[[int, int], Schedule], int]] = {  # With their stages per rank.
    "1f1b": (one_forward_one_backward, 1),
    "zb_h1": (zb_h1, 1),
    "zb_v": (zb_v, 2),
    "v_half": (v_half, 2),
    "v_min": (v_min, 2),
    "dual_pipe_v": (dual_pipe_v, 2),
}
NAMES = (*_LOOPED, *_FIXED, SOLVE)


def get_schedule(
    schedule: str | Schedule, num_ranks: int, num_micro_batches: int, stages_per_rank: int | None
) -> Schedule:
    """Returns the schedule of a name, or a given schedule, validated; for "solve" the one that is run to measure times.

    `stages_per_rank` None is the number that the schedule is built for: two in a V and where stages are interleaved,
    else one.
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
    if name in _FIXED:
        build, number = _FIXED[name]
        if stages_per_rank not in (None, number):
            raise ValueError(
                f"{schedule!r} has {number} stage{'s' * (number > 1)} on each rank, but stages_per_rank is "
                f"{stages_per_rank}: take another number of stages, or one of {', '.join((*_LOOPED, SOLVE))}"
            )
        return build(num_ranks, num_micro_batches)
    raise ValueError(f"there is no schedule {schedule!r}; there are {', '.join(NAMES)}, or pass a Schedule of your own")


def classic_schedules(num_ranks: int, num_stages: int, num_micro_batches: int) -> Iterator[Schedule]:
    """Yields the schedules with a name that have this number of stages, whatever their placement."""
    stages_per_rank, remainder = divmod(num_stages, num_ranks)
    if not remainder:
        for name, build_looped in _LOOPED.items():
            if stages_per_rank > 1 or name == "gpipe":  # With one stage, others are GPipe and 1F1B.
                yield build_looped(num_ranks, num_micro_batches, stages_per_rank)
        for build, number in _FIXED.values():
            if number == stages_per_rank:
                yield build(num_ranks, num_micro_batches)
