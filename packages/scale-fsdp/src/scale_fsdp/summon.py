"""Full parameters in the module tree, in place of their shards: to look at, to change, to initialize."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import Tensor, nn

from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.flat.buffer import FlatBuffer
from scale_core.optim.step_checks import register_unsharded
from scale_core.parameters import copy_attributes
from scale_fsdp.runtime.checks import param_replaced
from scale_fsdp.runtime.unit import ParamSlot, Unit, units_in

FullParams: TypeAlias = dict[FlatBuffer, list[nn.Parameter]]


@contextmanager
def full_params(units: Iterable[Unit], *, keep: bool) -> Iterator[None]:
    """Inside, these units, none of them in use, show full parameters in the dtype they are trained in.

    All ranks enter together. With `keep`, each rank takes its shard of the changed values.
    """
    units, full = list(units), FullParams()
    for unit in units:
        _show_full_params(unit, full)
    replaced: list[tuple[Unit, ParamSlot]] = []
    try:
        yield
        replaced = _replaced_slots(units, full)
    finally:
        for unit in units:
            _show_shards(unit)
        if keep:
            _write_back(full, full)
    for unit, slot in replaced:
        raise param_replaced(unit, slot)


@contextmanager
def full_params_for_apply(unit: Unit) -> Iterator[None]:
    """Inside, the unit shows full parameters; at the end all ranks take the parameters of rank 0. May be nested."""
    around = unit.applied_params
    full: FullParams = {} if around is None else around
    before = set(full)
    _show_full_params(unit, full)
    new_buffers = [buffer for buffer in full if buffer not in before]
    units = [inner for module in unit.modules for inner in units_in(module)]
    for inner in units:
        inner.applied_params = full
    try:
        yield
        for _, slot in _replaced_slots([unit], full):
            raise param_replaced(unit, slot)
        for buffer in new_buffers:
            unit.options.mesh_info.broadcast_from_rank_0(full[buffer])
        _write_back(full, new_buffers)
    finally:
        for buffer in new_buffers:
            del full[buffer]
        _show_shards(unit)
        for inner in units:
            inner.applied_params = around


@contextmanager
def with_flat_params(units: Iterable[Unit]) -> Iterator[None]:
    """Inside, units in `summon_full_params` show their flat parameters too, for a rank's local state."""
    hidden = [unit for unit in units if unit.in_summon]
    for unit in hidden:
        unit.set_flat_params()
    try:
        yield
    finally:
        for unit in hidden:
            unit.set_flat_params(shown=False)


def gather_full_params(unit: Unit, buffer: FlatBuffer) -> list[Tensor]:
    """Returns a buffer's full parameters, in the dtype they are trained in; all ranks call it together."""
    if unit.root is not None:
        unit.root.recover()
    event = Event("full parameters", unit.name)
    contract = (
        unit.root.contract
        if unit.root is not None and not unit.root.stale
        else Contract(unit.options.mesh_info.whole, unit.options.limit_seconds)
    )
    contract.sync_point(event)
    with contract.waiting(event):
        return buffer.gather_full_params(message_tag(event), contract.limit_seconds)


def _show_full_params(unit: Unit, full: FullParams) -> None:
    """Gathers and shows the buffers that are not in `full` yet, and those that the unit shares with others."""
    for owner in (unit, *unit.shared_owners):
        for buffer in owner.buffers:
            if buffer not in full:
                trains = buffer.trains and buffer.dtype.is_floating_point
                gathered = gather_full_params(owner, buffer)
                full[buffer] = [nn.Parameter(tensor, requires_grad=trains) for tensor in gathered]
                if not buffer.flatten:
                    for shard, param in zip(buffer.sharded_params, full[buffer], strict=True):
                        copy_attributes(shard, param)
                register_unsharded(full[buffer], buffer)
    unit.in_summon = True
    unit.set_flat_params(shown=False)
    for index, slot in enumerate(unit.slots):
        if slot.buffer in full:
            unit.set_whole(index, full[slot.buffer][slot.number])


def _replaced_slots(units: Iterable[Unit], full: FullParams) -> list[tuple[Unit, ParamSlot]]:
    """The slots that hold another tensor than the full parameter, which would be lost."""
    return [
        (unit, slot)
        for unit in units
        for index, slot in enumerate(unit.slots)
        if slot.buffer in full
        and slot.module._parameters.get(slot.attribute) is not unit.dtensors.get(index, full[slot.buffer][slot.number])
    ]


def _show_shards(unit: Unit) -> None:
    unit.in_summon = False
    unit.set_flat_params()
    unit.to_sharded()


@torch.no_grad()
def _write_back(full: FullParams, buffers: Iterable[FlatBuffer]) -> None:
    for buffer in buffers:
        buffer.release()
        for index, param in enumerate(full[buffer]):
            buffer.load(index, param)
            if not buffer.flatten:
                copy_attributes(param, buffer.sharded_params[index])
