"""What a pipeline is made of: the schedule, the stages, and what the ranks compare before they begin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from scale_pipe.distributed.plan import SharedParameter, Skip, Wiring
from scale_pipe.integers import check_positive
from scale_pipe.models.partition import check_balance, check_sequential, partition
from scale_pipe.models.skip_layout import skip_layout
from scale_pipe.models.skip_words import SkipKey
from scale_pipe.models.split import shared_parameters
from scale_pipe.schedules.classic import gpipe, interleaved_1f1b, looped_breadth_first, one_forward_one_backward
from scale_pipe.schedules.dual_pipe import dual_pipe_v
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.validation import validate
from scale_pipe.schedules.zero_bubble import v_half, v_min, zb_h1, zb_v

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


def cut_in_stages(
    module: nn.Module | Sequence[nn.Module], num_stages: int, balance: Sequence[int] | None
) -> list[nn.Module]:
    """Returns the stages of a model; no tensor moves.

    Args:
        module: A sequence of layers, or stages as `split` returns them.
        num_stages: How many the schedule has.
        balance: Layers of each stage, of a sequence; None where there is one for each stage.

    Raises:
        TypeError: It is neither.
        ValueError: The numbers do not fit.
    """
    if isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList):
        check_sequential(module)
        assert isinstance(module, nn.Sequential)
        if balance is None and len(module) == num_stages:
            balance = [1] * num_stages
        numbers = check_balance(balance, len(module), num_stages)
        if len(numbers) != num_stages:
            raise ValueError(
                f"the schedule has {num_stages} stages, but balance {numbers} makes {len(numbers)}: give {num_stages} "
                f"numbers whose sum is {len(module)}"
            )
        return list(partition(module, numbers, ["cpu"] * num_stages, move=False).modules)
    stages = list(module)
    if balance is not None:
        raise ValueError("a balance is for an nn.Sequential that is not cut yet; leave it out where stages are given")
    for index, stage in enumerate(stages):
        if not isinstance(stage, nn.Module):
            raise TypeError(
                f"expected a list of stages, as split(...) returns it, but stage {index} is {type(stage).__name__}"
            )
    if len(stages) != num_stages:
        raise ValueError(
            f"the schedule has {num_stages} stages, but {len(stages)} were given: split the model at {num_stages - 1} "
            "names, or take other stages_per_rank"
        )
    return stages


def stages_each(module: nn.Module | Sequence[nn.Module], num_ranks: int, balance: Sequence[int] | None) -> int | None:
    """Returns how many stages each rank has by what was given; None if that does not say, or says it unevenly.

    Args:
        module: As in `cut_in_stages`.
        num_ranks: Of the group.
        balance: Likewise.
    """
    if balance is not None:
        number = len(list(balance))
    elif isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList):
        return None
    else:
        number = len(list(module))
    return number // num_ranks if number and number % num_ranks == 0 else None


class Connections(NamedTuple):
    """What connects the stages of a model beside their order.

    Attributes:
        wiring: Skips and shared parameters, by name.
        skip_keys: By the name of a skip, the key that layers know it by.
        tied: By the name of a shared parameter and by stage, its name there.
    """

    wiring: Wiring
    skip_keys: dict[str, SkipKey]
    tied: dict[str, dict[int, str]]


def connections(stages: Sequence[nn.Module], placement: Placement) -> Connections:
    """Finds out what connects stages; of shared parameters, those that stand on several ranks.

    Args:
        stages: All of a model, which share tensors as it does.
        placement: Which rank holds which stage.
    """
    keys: dict[str, SkipKey] = {}
    skips = []
    for number, skip in enumerate(skip_layout(stages)):
        name = skip.key[1] if skip.key[1] not in keys else f"{skip.key[1]} ({number})"
        keys[name] = skip.key
        skips.append(Skip(name, skip.stashed_in, skip.popped_in))
    shared, tied = [], {}
    for places in shared_parameters(stages):
        name = places[0][1]
        if len({placement.rank_of[stage] for stage, _ in places}) > 1:
            shared.append(SharedParameter(name, tuple(sorted({stage for stage, _ in places}))))
            tied[name] = dict(reversed(places))
    return Connections(Wiring(tuple(skips), tuple(shared)), keys, tied)


def described(schedule: Schedule, stages: Sequence[nn.Module], wiring: Wiring) -> Iterator[str]:
    """Yields the lines that all ranks have to have in common; the first that differs is what an error shows.

    Args:
        schedule: What runs.
        stages: All of the model.
        wiring: What connects them.
    """
    ranks = schedule.placement.rank_of
    yield f"schedule {schedule.name}, {schedule.num_micro_batches} micro-batches, stages on ranks {ranks}"
    for rank, actions in enumerate(schedule.actions):
        digest = hashlib.sha256(" ".join(map(str, actions)).encode()).hexdigest()[:12]
        yield f"the list of rank {rank}: {len(actions)} actions, {digest}"
    for index, stage in enumerate(stages):
        names = [name for name, _ in stage.named_children()]
        yield f"stage {index}: {type(stage).__name__} of {', '.join(names)}"
        for name, param in stage.named_parameters():
            yield f"stage {index}: {name} {list(param.shape)} {param.dtype}{'' if param.requires_grad else ', frozen'}"
    yield from map(str, wiring.skips)
    yield from map(str, wiring.shared)
