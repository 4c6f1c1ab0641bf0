"""Builds a pipeline: its stages, what connects them, and the lines that all ranks compare before they begin."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from scale_pipe.distributed.program import CrossStageTensors, SharedParameter, SkipTransfer
from scale_pipe.module_split.split import shared_parameters
from scale_pipe.partition.partition import check_balance, check_sequential, partition
from scale_pipe.schedules.placement import StagePlacement
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.skip.layout import inspect_skip_layout
from scale_pipe.skip.namespace import SkipKey


def split_into_stages(
    module: nn.Module | Sequence[nn.Module], num_stages: int, balance: Sequence[int] | None
) -> list[nn.Module]:
    """Returns the stages of a sequence with its balance, or those that `split` made; no tensor moves.

    Raises TypeError if it is neither, and ValueError if numbers do not fit.
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


def infer_stages_per_rank(
    module: nn.Module | Sequence[nn.Module], num_ranks: int, balance: Sequence[int] | None
) -> int | None:
    """The stages of each rank by balance or list of stages; None if these do not tell, or are uneven."""
    if balance is not None:
        number = len(list(balance))
    elif isinstance(module, nn.Module) and not isinstance(module, nn.ModuleList):
        return None
    else:
        number = len(list(module))
    return number // num_ranks if number and number % num_ranks == 0 else None


class ModelConnections(NamedTuple):
    """What connects the stages of a model beside their order."""

    cross_stage: CrossStageTensors
    skip_keys: dict[str, SkipKey]  # by name of a skip, the key that layers use
    shared_names: dict[str, dict[int, str]]  # by name of a shared parameter and by stage, its name there


def find_connections(stages: Sequence[nn.Module], placement: StagePlacement) -> ModelConnections:
    """Finds the skips between all stages of a model, and the parameters that stages on several ranks share."""
    keys: dict[str, SkipKey] = {}
    skips = []
    for number, skip in enumerate(inspect_skip_layout(stages)):
        name = skip.key[1] if skip.key[1] not in keys else f"{skip.key[1]} ({number})"
        keys[name] = skip.key
        skips.append(SkipTransfer(name, skip.stashed_in, skip.popped_in))
    shared, names = [], {}
    for places in shared_parameters(stages):
        name = places[0][1]
        if len({placement.rank_of[stage] for stage, _ in places}) > 1:
            shared.append(SharedParameter(name, tuple(sorted({stage for stage, _ in places}))))
            names[name] = dict(reversed(places))
    return ModelConnections(CrossStageTensors(tuple(skips), tuple(shared)), keys, names)


def fingerprint_lines(schedule: Schedule, stages: Sequence[nn.Module], cross_stage: CrossStageTensors) -> Iterator[str]:
    """Yields the lines that all ranks must have in common; an error shows the first that differs."""
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
    yield from map(str, cross_stage.skips)
    yield from map(str, cross_stage.shared)
