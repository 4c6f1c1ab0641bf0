"""`half()`, `to()`, `cuda()`, `to_empty()`: the parameters of a sharded module in another dtype, or on another device.

torch makes all of these of one function that it calls with each tensor. Here it is called with each shard as a whole,
and the flat buffer moves into what comes back. As in a plain module, a parameter stays the same object where torch can
give it other memory, so that an optimizer goes on with it; from the meta device on it is another one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import Devices, FlatBuffer
from scale_fsdp.checks import note_blank_buffers, note_blank_shard
from scale_fsdp.guards import refuse_in_use
from scale_fsdp.param_registry import modules_of_unit, remember
from scale_fsdp.unit import Unit, flat_name_of, unit_of, units_in

Conversion = Callable[[Tensor], Tensor]


class Converting(nn.Module):
    """What of a sharded module other dtypes and devices are made of."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """What `to`, `half`, `float`, `cuda`, `to_empty` and the like are made of."""
        unit = unit_of(self)
        assert unit is not None
        units = units_in(self) if recurse else [unit]
        refuse_in_use(units, "to(), half() and the like")
        for member in units:
            _check_convertible(member, fn)
        with torch.no_grad():
            changed = [_convert(unit, buffer, fn) for buffer in unit.buffers]
            if any(changed):
                unit.move()
                remember(unit)
        before = [(module, dict(module._buffers)) for _, module in modules_of_unit(self)]
        with _hidden(unit):
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        unit.buffer_dtypes = {k: fn(torch.empty(0, dtype=dtype)).dtype for k, dtype in unit.buffer_dtypes.items()}
        convert_buffers(unit)
        for module, buffers in before:
            note_blank_buffers(module, buffers)
        show_moved(units)
        return self


def show_moved(units: Iterable[Unit]) -> None:
    """Puts the parameters of units that have moved into their modules, also where one is lent to another unit."""
    for unit in units:
        unit.to_sharded()
        if unit.options.flatten:
            for number, buffer in enumerate(unit.buffers):
                unit.module._parameters[flat_name_of(number)] = buffer.exposed[0]


def convert_buffers(unit: Unit) -> None:
    """Brings the module's own buffers to where it computes, and into the dtype that the policy names."""
    dtype = unit.precision.buffer_dtype
    for path, child in modules_of_unit(unit.module):
        for name, buffer in child._buffers.items():
            if buffer is not None:
                device = None if buffer.is_meta else unit.options.placement.compute
                if dtype is not None and buffer.is_floating_point():
                    unit.buffer_dtypes.setdefault(f"{path}.{name}".lstrip("."), buffer.dtype)
                child._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)


def _check_convertible(unit: Unit, fn: Conversion) -> None:
    if unit.backward_unobserved or (unit.root is not None and not unit.root.synchronizes):
        raise RuntimeError(
            f"to(), half() and the like: the parameters of {unit_title(unit.name)} are between a forward and its "
            "backward, or inside no_sync(): convert the model before or after"
        )
    for buffer in unit.buffers:
        there = fn(buffer.shard.new_empty(0)).device
        if unit.options.placement.params_on_host and there.type not in ("cpu", "meta") and not buffer.is_meta:
            raise RuntimeError(
                f"the shards of {unit_title(unit.name)} are kept on the host by move_params_to_cpu=True, and can't go "
                f"to {there}: it computes on {buffer.compute_device} as it is; fully_shard(..., compute_device=...) "
                "names another device, and without move_params_to_cpu=True the shards are there, too"
            )


def _convert(unit: Unit, buffer: FlatBuffer, fn: Conversion) -> bool:
    """Converts one flat buffer and the gradients of its parameters; returns whether anything has changed."""
    shard = fn(buffer.shard)
    if shard is buffer.shard:
        return False
    was_meta, gradient = buffer.is_meta, buffer.gradient
    grads = [None if param.grad is None else fn(param.grad) for param in buffer.exposed]
    devices = _devices_after(unit, buffer, shard.device)
    if shard.device != devices.shard:  # Asked for where it computes, but its shards are on the host.
        shard = torch.empty_like(shard, device=devices.shard)
    groups = unit.options.ranks.with_part(unit.options.reshard_after_forward) if was_meta else None
    buffer.rehouse(shard, groups=groups, devices=devices)
    for param, grad in zip(buffer.exposed, grads, strict=True):
        param.grad = grad
    buffer.gradient.take_over(gradient, buffer.compute_device)
    if was_meta and not buffer.is_meta:
        note_blank_shard(buffer)
    return True


def _devices_after(unit: Unit, buffer: FlatBuffer, there: torch.device) -> Devices:
    placement = unit.options.placement
    if there == buffer.devices.shard:
        return buffer.devices
    if there.type == "meta":
        return Devices(there, there, there)
    if not buffer.is_meta and placement.compute is not None:
        placement = replace(placement, compute=there)
        unit.options = replace(unit.options, placement=placement)
    return placement.devices_for(there)


@contextmanager
def _hidden(unit: Unit) -> Iterator[None]:
    """Inside, the unit's modules have no parameters of it: torch would convert each shard by itself."""
    places = [(slot.module, slot.attribute) for slot in unit.slots]
    if unit.options.flatten:
        places += [(unit.module, flat_name_of(number)) for number in range(len(unit.buffers))]
    for module, attribute in places:
        if attribute in module._parameters:
            module._parameters[attribute] = None
    try:
        yield
    finally:
        show_moved([unit])
