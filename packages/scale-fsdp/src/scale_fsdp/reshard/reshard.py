"""Another number of ranks, or another strategy, for a model that lives: in memory, without a checkpoint.

Buffer by buffer, the old ranks gather what they have, and each new rank takes its piece of it: the parameters first,
then each layer of what is kept beside them. So nothing is ever whole but one of these, and every number is the same
afterwards. Ranks that join come with a model on the meta device, and are sent what the others have gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from scale_core.comm.collectives import all_gather, broadcast
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.consistency.all_ranks import Together
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag, unit_title
from scale_core.flat.buffer import Devices, FlatBuffer
from scale_core.flat.layout import FlatLayout
from scale_fsdp.ema import ShardedEMA
from scale_fsdp.guards import refuse_in_use
from scale_fsdp.mesh_info import Ranks, ranks_of
from scale_fsdp.param_registry import modules_of_unit, remember
from scale_fsdp.reshard.attached_state import Beside, Inventory
from scale_fsdp.reshard.convert import show_moved
from scale_fsdp.unit import Unit, paths_in, units_in

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
        if waiting or unit.backward_unobserved or (unit.root is not None and not unit.root.synchronizes):
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


def reshard_to(
    model: nn.Module,
    process_group: NewGroup = "same",
    *,
    optimizer: Optimizer | Sequence[Optimizer] = (),
    ema: ShardedEMA | None = None,
    reshard_after_forward: bool | int | None = None,
    over: GroupLike = None,
    limit_seconds: float | None = None,
) -> None:
    """Shards a sharded model anew, in place: over other ranks, or in another way over the same ones.

        >>> import torch
        >>> from scale_fsdp import fully_shard, reshard_to
        >>> model = fully_shard(torch.nn.Linear(4, 2))
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> reshard_to(model, optimizer=optimizer, reshard_after_forward=False)

    All ranks that share the model now, and all that are to share it, call it together, between two steps. The
    parameters and their optimizer stay the same objects, with other elements; gradients that are there go along.
    Training then goes on as if nothing had changed, but for the order in which gradients are summed over the ranks.

    A rank that joins builds the model under `torch.device("meta")`, shards it in the same units by
    `fully_shard(..., process_group, init=False)`, and builds the optimizer. It gets everything, learning rates too; a
    scheduler it has to set by itself. A rank that leaves passes what `torch.distributed.new_group` has returned to it;
    its model is left on the meta device, and may join again.

    Args:
        model: The sharded model.
        process_group: The new ranks: as for `fully_shard`, or "same".
        optimizer: That, or those, of the model.
        ema: Its average.
        reshard_after_forward: As for `fully_shard`; None as before.
        over: A group that holds all old and all new ranks; None is the default group.
        limit_seconds: The longest wait for another rank; None is that group's own limit.

    Raises:
        RuntimeError: On all ranks, whichever of them found it, and before anything is changed: the model is in use, or
            there is state that can't be cut.
        ValueError: On all ranks, and before anything is changed: they do not have the same model and optimizers, or do
            not mean the same new ranks.
        ScaleDistributedError: A rank was lost on the way. The model is then partly moved: load a checkpoint.
    """
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    union, units = group_of(over), units_in(model)
    buffers = [buffer for unit in units for buffer in unit.buffers]
    beside = Beside(model, optimizers, ema)

    def look() -> Standing:
        check_at_rest(model, units)
        for unit in units:
            ranks = new_ranks(unit, process_group)
            if ranks is not None:
                ranks.check_part(strategy_of(unit, reshard_after_forward))
        return Standing.of(model, units, process_group, reshard_after_forward, beside.inventory(buffers))

    together = Together(union, "reshard_to", RuntimeError)
    everyone = together.all_do(look)
    compare(everyone, union)
    new = [new_ranks(unit, process_group) for unit in units]
    stays = all(rank.keeps for rank in everyone) and all(rank.has_values for rank in everyone)
    move = _Move.of(everyone, union, beside, limit_seconds)
    for unit, ranks, number in zip(units, new, everyone[move.source].numbers, strict=True):
        unit.number = number
        if ranks is not None:
            strategy = strategy_of(unit, reshard_after_forward)
            unit.options = replace(unit.options, ranks=ranks, reshard_after_forward=strategy)
            unit.reshard_after_forward = ranks.releases(strategy)
        with move.contract.waiting(Event("resharding", unit.name)):
            for buffer in unit.buffers if stays else ():
                if not buffer.is_meta and ranks is not None:
                    buffer.release()
                    buffer.groups = ranks.with_part(unit.options.reshard_after_forward)
            for buffer in () if stays else unit.buffers:
                move.buffer(unit, buffer, ranks)
            if move.joining:
                move.module_buffers(unit)
        if ranks is None:
            for _, module in modules_of_unit(unit.module):
                module._buffers.update({n: b.to("meta") for n, b in module._buffers.items() if b is not None})
        unit.move()
    if move.joining:
        with move.contract.waiting(Event("resharding", units[0].name)):
            move.averages_of_module_buffers(units[0])
    show_moved(units)
    if move.joins:
        beside.begin(buffers, everyone[move.source].inventory)


@dataclass
class _Move:
    """The way of everything from its old to its new ranks.

    Attributes:
        union: All ranks.
        source: The one that sends what it has gathered, where it does.
        joining: There are ranks that have nothing yet.
        joins: This is one of them.
        sends: What was gathered is sent to all: to those that join, or that have not shared one model so far.
        layouts: The old ones.
        inventory: What there is beside the parameters.
        beside: The same, on this rank.
        contract: Of the union.
        done: How many buffers have moved.
    """

    union: Group
    source: int
    joining: bool
    joins: bool
    sends: bool
    layouts: list[FlatLayout]
    inventory: Inventory
    beside: Beside
    contract: Contract
    done: int = 0

    @classmethod
    def of(cls, everyone: Sequence[Standing], union: Group, beside: Beside, limit_seconds: float | None) -> _Move:
        source = next(number for number, rank in enumerate(everyone) if rank.has_values)
        joining = any(rank.ranks and not rank.has_values for rank in everyone)
        told, own = everyone[source], everyone[union.rank]
        joins = bool(own.ranks) and not own.has_values
        sends = joining or sum(rank.has_values for rank in everyone) != len(told.old)
        contract = Contract(union, limit_seconds)
        return cls(union, source, joining, joins, sends, told.layouts, told.inventory, beside, contract)

    def buffer(self, unit: Unit, buffer: FlatBuffer, ranks: Ranks | None) -> None:
        """Moves the next flat buffer and what is beside it; without new ranks, away from here."""
        old, layers = self.layouts[self.done], self.inventory.layers[self.done]
        self.done += 1
        parts = _OldParts(buffer, old, message_tag(Event("resharding", f"{unit.name}#{self.done}")))
        devices = buffer.devices
        if buffer.is_meta:
            devices = unit.options.placement.devices_for(unit.options.device_for(buffer.shard.device))
        tensors = {layer: self.beside.take(buffer, layer) for layer in layers} if parts.has_values else {}
        params = list(buffer.exposed)
        layout = old
        if ranks is not None:
            names, shapes = [entry.name for entry in old.entries], [entry.shape for entry in old.entries]
            layout = FlatLayout.plan(names, shapes, ranks.shard.size, unit.options.atom)
        # The buffer moves as soon as its new shard is there: so that only one of both lives beside the next layer.
        full = self._whole(parts, None, buffer.dtype, devices)
        if ranks is not None:
            groups = ranks.with_part(unit.options.reshard_after_forward)
            shard = _cut(full, old, layout, ranks, devices)
            buffer.rehouse(shard, layout=layout, groups=groups, devices=devices)
        elif parts.has_values:
            buffer.rehouse(torch.empty_like(buffer.shard, device="meta"))
        del full
        remember(unit)
        self.beside.follow(params, buffer)
        for layer in layers:
            full = self._whole(parts, tensors.pop(layer, {}), layer.dtype, devices)
            if ranks is not None:
                self.beside.put(buffer, layer, _cut(full, old, layout, ranks, devices))
            del full

    def module_buffers(self, unit: Unit) -> None:
        """Sends the module's own buffers to those that join; the others keep theirs."""
        for _, module in modules_of_unit(unit.module):
            for name, tensor in module._buffers.items():
                if tensor is not None:
                    sent = self._sent(tensor, unit)
                    if self.joins:
                        module._buffers[name] = sent

    def averages_of_module_buffers(self, unit: Unit) -> None:
        """Does the same with what an average has for them; the unit says where it computes."""
        for average, take in self.beside.of_module_buffers():
            sent = self._sent(average, unit)
            if self.joins:
                take(sent)

    def _whole(
        self, parts: _OldParts, tensors: Mapping[int, Tensor] | None, dtype: torch.dtype, devices: Devices
    ) -> Tensor:
        """[W * S] of the old layout: every old rank's part of the parameters or of a layer."""
        full = torch.empty(parts.layout.full_numel, dtype=dtype, device=devices.compute)
        if parts.has_values and full.numel():
            part = parts.fill(full, tensors)
            all_gather(full, part, parts.group, tag=parts.tag).wait(self.contract.limit_seconds)
        if self.sends:
            self._send(full)
        return full

    def _sent(self, tensor: Tensor, unit: Unit) -> Tensor:
        """The source's tensor, of the shape and dtype of this rank's."""
        device = unit.options.device_for(torch.device("meta"))
        sent = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if self.union.rank == self.source:
            sent.copy_(tensor)
        self._send(sent.reshape(-1))
        return sent

    def _send(self, tensor: Tensor) -> None:
        """Gives all ranks the source's [N]."""
        if tensor.numel():
            sent = broadcast(tensor.view(torch.uint8), self.union, source=self.source)
            sent.wait(self.contract.limit_seconds)


class _OldParts:
    """What a rank has of a flat buffer that is about to move.

    Args:
        buffer: The buffer.
        layout: Its layout on those ranks that have values.
        tag: Of the messages.
    """

    def __init__(self, buffer: FlatBuffer, layout: FlatLayout, tag: int) -> None:
        self.layout, self.group, self.tag = layout, buffer.group, tag
        self.has_values = not buffer.is_meta
        self._buffer, self._spans, self._flatten = buffer, buffer.spans, buffer.flatten

    def fill(self, full: Tensor, tensors: Mapping[int, Tensor] | None) -> Tensor:
        """Writes this rank's part of a full buffer and returns it: the shard, or tensors beside the parameters."""
        size = self.layout.shard_numel
        part = full.narrow(0, self.group.rank * size, size)
        if tensors is None:
            return part.copy_(self._buffer.shard)
        part.zero_()
        for index, tensor in tensors.items():
            span = self._spans[index]
            place = part if self._flatten else part.narrow(0, span.shard_offset, span.numel)
            place.copy_(tensor.reshape(-1))
        return part


def _cut(full: Tensor, old: FlatLayout, new: FlatLayout, ranks: Ranks, devices: Devices) -> Tensor:
    """[S] of the new layout: this rank's piece of a full buffer of the old one."""
    shard = torch.zeros(new.shard_numel, dtype=full.dtype, device=devices.shard)
    for entry, span in zip(old.entries, new.spans(ranks.shard.rank), strict=True):
        held = full.narrow(0, entry.offset + span.start, span.numel)
        shard.narrow(0, span.shard_offset, span.numel).copy_(held)
    return shard
