"""Where each rank stands before a model is sharded anew, and whether all of them mean the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scale_core.events import unit_title
from scale_core.group import Group, GroupLike
from scale_core.layout import FlatLayout
from scale_fsdp.guard import refuse_in_use
from scale_fsdp.moving.beside import Inventory
from scale_fsdp.places import modules_of_unit
from scale_fsdp.ranks import Ranks, ranks_of
from scale_fsdp.slots import paths_in
from scale_fsdp.unit import Unit

NewGroup: TypeAlias = GroupLike | Literal["same"]


@dataclass(frozen=True)
class Standing:
    """What a rank tells the others before anything is moved.

    Attributes:
        has_values: It has a part of the model; what it has is not on meta.
        keeps: It was told to keep its group.
        old: The ranks that share its part, by their global numbers.
        ranks: The new ones; () if this is none of them.
        copies: How many copies of the model there will be; 0 if this is none of the new ranks.
        strategy: The argument.
        model: Names, shapes and dtypes.
        layouts: Of each flat buffer, as it is.
        inventory: What there is beside the parameters.
        numbers: Of the units.
    """

    has_values: bool
    keeps: bool
    old: tuple[int, ...]
    ranks: tuple[int, ...]
    copies: int
    strategy: bool | int | None
    model: list[str]
    layouts: list[FlatLayout]
    inventory: Inventory
    numbers: list[int]

    @classmethod
    def of(
        cls,
        model: nn.Module,
        units: Sequence[Unit],
        process_group: NewGroup,
        strategy: bool | int | None,
        inventory: Inventory,
    ) -> Standing:
        paths, new = paths_in(model), new_ranks(units[0], process_group)
        buffers = [buffer for unit in units for buffer in unit.buffers]
        return cls(
            has_values=not any(buffer.is_meta for buffer in buffers),
            keeps=process_group == "same",
            old=units[0].options.ranks.whole.ranks,
            ranks=() if new is None else new.whole.ranks,
            copies=0 if new is None else new.replicas.size,
            strategy=strategy,
            model=[line for unit in units for line in _describe(unit, paths[id(unit.module)])],
            layouts=[buffer.layout for buffer in buffers],
            inventory=inventory,
            numbers=[unit.number for unit in units],
        )


def new_ranks(unit: Unit, process_group: NewGroup) -> Ranks | None:
    """The ranks that are to share the unit; None if this is none of them.

    Raises:
        ValueError: It is a text other than "same", or as for `ranks_of`.
        TypeError: As for `ranks_of`.
    """
    if isinstance(process_group, str):
        if process_group != "same":
            raise ValueError(f"process_group: expected a group, a mesh, None or 'same', got {process_group!r}")
        return unit.options.ranks
    if process_group is cast(object, dist.GroupMember.NON_GROUP_MEMBER):  # new_group returned it
        return None
    if isinstance(process_group, DeviceMesh) and process_group.get_coordinate() is None:
        return None
    return ranks_of(process_group)


def strategy_of(unit: Unit, asked: bool | int | None) -> bool | int:
    """The unit's `reshard_after_forward` from now on."""
    return unit.options.reshard_after_forward if asked is None else asked


def check_at_rest(model: nn.Module, units: Sequence[Unit]) -> None:
    """Checks that this rank's model can be sharded anew.

    Raises:
        ValueError: It is not sharded, or waits for a backward pass or a reduction.
        RuntimeError: Its parameters are in use.
    """
    if not units:
        raise ValueError(f"no module in this {type(model).__name__} is sharded: call fully_shard(model) first")
    refuse_in_use(units, "reshard_to")
    for unit in units:
        waiting = [buffer.names[0] for buffer in unit.buffers if buffer.has_gradient]
        if waiting or unit.hidden or (unit.root is not None and not unit.root.synchronizes):
            raise ValueError(
                f"{unit_title(unit.name)} is between a forward and its backward, or inside no_sync(), or has gradients "
                "that wait for their reduction: run the last backward() of the step outside of no_sync() first"
            )
    if len({any(buffer.is_meta for buffer in unit.buffers) for unit in units if unit.buffers}) > 1:
        raise ValueError("some units are on the meta device and others are not: bring all of them to one state first")


def _describe(unit: Unit, path: str) -> list[str]:
    """All that must be alike on all ranks, line by line."""
    title = path or "root"
    lines = [f"{title}: flatten={unit.options.flatten}, {unit.precision}"]
    for buffer in unit.buffers:
        lines += [
            f"{title}: {name} {entry.shape} {buffer.dtype} trains={buffer.exposed_of(index).requires_grad}"
            for index, (name, entry) in enumerate(zip(buffer.names, buffer.layout.entries, strict=True))
        ]
    for name, module in modules_of_unit(unit.module, path):
        lines += [f"{name}.{key} {tuple(b.shape)} {b.dtype}" for key, b in module._buffers.items() if b is not None]
    return lines


def compare(everyone: Sequence[Standing], union: Group) -> None:
    """Checks that all ranks mean the same.

    Raises:
        ValueError: They don't; on all of them.
    """
    sources = [rank for rank in everyone if rank.has_values]
    if not sources:
        raise ValueError("no rank has values: every one of them came with a model on the meta device")
    first = sources[0]
    new = next((rank for rank in everyone if rank.ranks), None)
    if new is None:
        raise ValueError("no rank is to share the model: at least one has to pass a group that it is a member of")
    asked = tuple(union.ranks[number] for number, rank in enumerate(everyone) if rank.ranks)
    here = {union.ranks[number] for number, rank in enumerate(everyone) if rank.has_values}
    for number, rank in enumerate(everyone):
        for mine, theirs in zip(rank.model, first.model, strict=False):
            if mine != theirs:
                raise ValueError(f"rank {number} has another model than the others: {mine!r}, expected {theirs!r}")
        if len(rank.model) != len(first.model):
            more = (rank.model + first.model)[min(len(rank.model), len(first.model))]
            raise ValueError(f"rank {number} has another model than the others: only one of them has {more!r}")
        if rank.ranks and (set(rank.ranks) != set(asked) or rank.ranks != new.ranks or rank.copies != new.copies):
            raise ValueError(
                f"rank {number} means the ranks {list(rank.ranks)} in {rank.copies} copies, but a group was passed by "
                f"ranks {list(asked)}: let all of these pass the same one"
            )
        if rank.has_values and not set(rank.old) <= here:
            raise ValueError(
                f"rank {number} shares the model with ranks {list(rank.old)}, of which only {sorted(here)} are here "
                "with values: let all old and all new ranks call it, over=a group that holds them all"
            )
        if rank.strategy != first.strategy:
            raise ValueError(f"rank {number} has reshard_after_forward={rank.strategy!r}, others {first.strategy!r}")
        if rank.inventory.names != first.inventory.names:
            raise ValueError(
                f"the optimizers of rank {number} have other parameters, or other groups of them, than the others'"
            )
        averages = [(each.inventory.num_updates < 0, each.inventory.averages) for each in (rank, first)]
        if averages[0] != averages[1]:
            raise ValueError(
                f"rank {number} and others differ in whether there is an average, or of which dtype: pass ema= on all "
                "ranks or on none"
            )
        if rank.has_values and rank.inventory != first.inventory:
            raise ValueError(
                f"what rank {number} keeps beside its parameters is not what the others keep beside theirs"
            )
