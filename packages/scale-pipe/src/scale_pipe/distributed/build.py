"""What a pipeline is made of: its stages, and what the ranks compare before they begin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from scale_pipe.distributed.program.plan import SharedParameter, Skip, Wiring
from scale_pipe.module_split.split import shared_parameters
from scale_pipe.partition.partition import check_balance, check_sequential, partition
from scale_pipe.schedules.placement import Placement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.skip.layout import skip_layout
from scale_pipe.skip.namespace import SkipKey


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
