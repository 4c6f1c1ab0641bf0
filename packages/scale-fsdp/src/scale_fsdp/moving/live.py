"""Another number of ranks, or another strategy, for a model that lives: in memory, without a checkpoint.

Buffer by buffer, the old ranks gather what they have, and each new rank takes its piece of it: the parameters first,
then each layer of what is kept beside them. So nothing is ever whole but one of these, and every number is the same
afterwards. Ranks that join come with a model on the meta device, and are sent what the others have gathered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.collectives import all_gather, broadcast
from scale_core.contract import Contract
from scale_core.events import Event, message_tag
from scale_core.flat import Devices, FlatBuffer
from scale_core.group import Group, GroupLike, group_of
from scale_core.layout import FlatLayout
from scale_core.together import Together
from scale_fsdp.ema import ShardedEMA
from scale_fsdp.moving.beside import Beside, Inventory
from scale_fsdp.moving.converting import show_moved
from scale_fsdp.moving.standing import NewGroup, Standing, check_at_rest, compare, new_ranks, strategy_of
from scale_fsdp.places import modules_of_unit, remember
from scale_fsdp.ranks import Ranks
from scale_fsdp.unit import Unit, units_in


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
