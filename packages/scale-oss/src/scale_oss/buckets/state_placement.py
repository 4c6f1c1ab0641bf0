"""State placement: the rank that keeps the state of an element of a parameter, and its tensor there.

An optimizer of `torch.optim` keeps its state by its parameters. Here those are parts of the user's parameters, other
ones on every rank; saving, loading and measuring look them up in a `StatePlacement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, group_of
from scale_core.shard import Placement, Shard, unit_shard_of
from scale_core.state.param_ownership import flat_buffer_of


class Range(NamedTuple):
    """The elements `[start, stop)` of a parameter, in row-major order."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class StatePlacement:
    """Where the state of one parameter is kept."""

    param: nn.Parameter  # the user's, full or a shard
    name: str  # in errors
    shape: tuple[int, ...]  # of the full parameter
    ranges: tuple[Range, ...]  # by rank of the group, the elements that it updates and keeps the state of
    owner: int | None  # the rank that updates all of it, with a state of any shape; None if each updates elements
    group: Group  # the ranks that have a part of it
    stepped: nn.Parameter | None  # the tensor that this rank's optimizer steps on, if it has a part

    @cached_property
    def optimizer_param(self) -> nn.Parameter | None:
        """The parameter in this rank's optimizer; None where other ranks have all of it."""
        if self.owner is not None:
            return self.stepped if self.group.rank == self.owner else None
        # A parameter without elements has its state, too: where tensors are cut, on every rank.
        return self.stepped if self.local_range.numel or not any(span.numel for span in self.ranges) else None

    @property
    def local_range(self) -> Range:
        return self.ranges[self.group.rank]

    @property
    def first_holder(self) -> int:
        if self.owner is not None:
            return self.owner
        return next((rank for rank, span in enumerate(self.ranges) if span.numel), 0)


class ShardedParam(NamedTuple):
    """A parameter that is sharded already."""

    param: nn.Parameter  # this rank's shard
    name: str  # in the plain model
    shape: tuple[int, ...]  # of the full parameter
    group: Group  # the ranks between which it is sharded; of size 1 where one rank holds all of it
    ranges: tuple[Range, ...]  # the elements that each of them holds, by rank

    @property
    def numel(self) -> int:
        return sum(span.numel for span in self.ranges)

    @property
    def holder(self) -> int | None:
        """The rank that holds all of it; None where it is divided."""
        return next((rank for rank, span in enumerate(self.ranges) if span.numel == self.numel), None)


def sharding_group(shard: Shard, within: Group | None) -> Group:
    """Returns the ranks between which a parameter is sharded; of size 1 where it is not."""
    if any(axis.placement is Placement.PARTIAL for axis in shard.axes):
        raise ValueError(f"OSS: '{shard.name}' is a partial sum on each rank. Reduce it before it is optimized")
    groups = [axis.group for axis in shard.axes if axis.placement is Placement.SHARD and axis.group.size > 1]
    if len(groups) > 1:
        raise ValueError(
            f"OSS: '{shard.name}' is divided along {len(groups)} axes of a mesh, between ranks "
            f"{' and '.join(str(list(group.ranks)) for group in groups)}: expected one. Step with a plain optimizer on "
            "model.parameters(), whose state is sharded as they are"
        )
    if not groups:
        return Group()
    if within is not None and not set(groups[0].ranks) <= set(within.ranks):
        raise ValueError(
            f"OSS: '{shard.name}' is divided between ranks {list(groups[0].ranks)}, but its group is of ranks "
            f"{list(within.ranks)}. Leave group out, or pass the group of the model"
        )
    return groups[0]


def ranks_of_shards(params: Sequence[nn.Parameter]) -> Group:
    """Returns the ranks between which these are sharded, if all are shards over the same ones, or else all ranks."""
    shards = [unit_shard_of(param) for param in params]
    groups = {None if shard is None else sharding_group(shard, None) for shard in shards}
    shard_group = groups.pop() if len(groups) == 1 else None
    return group_of() if shard_group is None else shard_group


def gather_shards(params: Sequence[nn.Parameter], within: Group, limit_seconds: float) -> list[ShardedParam]:
    """Returns the ranges that all ranks hold of these shards; all ranks call it together, with the same parameters."""
    shards = [unit_shard_of(param) for param in params]
    local_shards = [shard for shard in shards if shard is not None]
    assert len(local_shards) == len(params), "asked of a parameter that is not a shard"
    groups = [sharding_group(shard, within) for shard in local_shards]
    ranges: dict[int, tuple[Range, ...]] = {}
    for group in dict.fromkeys(groups):
        members = [number for number, other_group in enumerate(groups) if other_group == group]
        held_by_rank = _gather_ranges([local_shards[number] for number in members], group, limit_seconds)
        ranges.update(zip(members, held_by_rank, strict=True))
    return [
        ShardedParam(param, shard.name, shard.shape, groups[number], ranges[number])
        for number, (param, shard) in enumerate(zip(params, local_shards, strict=True))
    ]


def check_not_flat(param: nn.Parameter, name: str, optim_name: str) -> None:
    """Checks that a parameter is not a flat one, for an optimizer that needs full tensors."""
    buffer = flat_buffer_of(param)
    if buffer is not None:
        raise ValueError(
            f"OSS: {optim_name} needs each full parameter, but '{name}' is one flat parameter that holds "
            f"{len(buffer.names)}, as '{buffer.names[0]}'. Shard the model with flatten_parameters=False"
        )


def check_gatherable(param: nn.Parameter, name: str) -> None:
    """Checks that the state of a parameter can be numbered as in the plain optimizer."""
    if flat_buffer_of(param) is not None:
        raise ValueError(
            f"OSS: the state of '{name}' belongs to one flat parameter, which the plain model doesn't have. Gather it "
            "by the names of parameters, scale_fsdp.full_optim_state_dict(model, optimizer.optim), or save it by "
            "scale_core.state.sharded_state_dict(model, optimizer)"
        )


def _gather_ranges(shards: Sequence[Shard], group: Group, limit_seconds: float) -> list[tuple[Range, ...]]:
    """The elements that each rank of the group holds of each shard."""
    if group.backend == "fake":  # The others don't exist: they share the elements that this rank doesn't hold.
        return [_fake_ranges(shard, group) for shard in shards]
    record = [number for shard in shards for number in (shard.start, shard.stop)]
    rows = exchange(record, group, limit_seconds=limit_seconds)
    ranges_by_shard = []
    for index, shard in enumerate(shards):
        ranges = tuple(Range(row[2 * index], row[2 * index + 1]) for row in rows)
        offset = 0
        for start, stop in sorted(span for span in ranges if span.numel):
            if start != offset:
                break
            offset = stop
        if offset != shard.numel:
            raise ValueError(
                f"OSS: expected the ranks to hold each of the {shard.numel} elements of '{shard.name}' once, but they "
                f"hold {[list(span) for span in ranges]}"
            )
        ranges_by_shard.append(ranges)
    return ranges_by_shard


def _fake_ranges(shard: Shard, group: Group) -> tuple[Range, ...]:
    before, after = group.rank, group.size - group.rank - 1
    cuts = [shard.start * rank // before for rank in range(before)] if before else []
    cuts += [shard.start if before else 0, shard.stop if after else shard.numel]
    cuts += [shard.stop + (shard.numel - shard.stop) * (rank + 1) // after for rank in range(after)]
    return tuple(Range(start, stop) for start, stop in pairwise(cuts))
