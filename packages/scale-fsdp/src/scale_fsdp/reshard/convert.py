"""Dtype and device conversion of sharded modules: `half()`, `to()`, `cuda()`, `to_empty()`.

torch implements all of these by `_apply`, with a function that it calls with each tensor. Here it is called with each
full shard, and the flat buffer moves into the result. As in a plain module a parameter stays the same object
where torch can give it other memory, so that an optimizer goes on with it; from the meta device on it is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_core.flat.config import DevicePolicy
from scale_core.shard import on_local_tensors
from scale_fsdp.runtime.checks import (
    check_not_in_use,
    check_not_replaced,
    track_uninitialized_buffers,
    track_uninitialized_shard,
)
from scale_fsdp.runtime.param_registry import managed_modules, register_owner
from scale_fsdp.runtime.unit import Unit, unit_of, units_in

Conversion = Callable[[Tensor], Tensor]


class ConversionMethods(nn.Module):
    """The `_apply` of a sharded module."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Implements `to`, `half`, `float`, `cuda`, `to_empty` and the like."""
        unit = unit_of(self)
        assert unit is not None
        units = units_in(self) if recurse else [unit]
        check_not_in_use(units, "to(), half() and the like")
        # Only the outermost call checks: inside it, units that share parameters still show each other's old ones.
        is_outermost = not unit.in_conversion
        if is_outermost:
            check_not_replaced(units)
        for member in units:
            _check_convertible(member, fn)
        with torch.no_grad():
            changed = [_convert_flat_buffer(unit, buffer, fn) for buffer in unit.buffers]
            if any(changed):
                unit.on_buffers_moved()
                register_owner(unit)
        before = [(module, dict(module._buffers)) for _, module in managed_modules(self)]
        for member in units:
            member.in_conversion = True
        try:
            with _without_params(unit):
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        finally:
            if is_outermost:
                for member in units:
                    member.in_conversion = False
        unit.buffer_dtypes = {k: fn(torch.empty(0, dtype=dtype)).dtype for k, dtype in unit.buffer_dtypes.items()}
        convert_buffers(unit)
        for module, buffers in before:
            track_uninitialized_buffers(module, buffers)
        rebind_params(units)
        return self


@on_local_tensors
def rebind_params(units: Iterable[Unit]) -> None:
    """Registers the parameters of units that have moved in their modules, and in units that share them."""
    for unit in units:
        unit.to_sharded()
        unit.set_flat_params()


@on_local_tensors
def convert_buffers(unit: Unit) -> None:
    """Moves the module's own buffers to where it computes, in the policy's buffer dtype."""
    dtype = unit.precision.buffer_dtype
    places = ((n, *named_module) for n, module in enumerate(unit.modules) for named_module in managed_modules(module))
    for number, path, child in places:
        for name, buffer in child._buffers.items():
            if buffer is not None:
                device = None if buffer.is_meta else unit.options.placement.compute
                if dtype is not None and buffer.is_floating_point():
                    unit.buffer_dtypes.setdefault((number, f"{path}.{name}".lstrip(".")), buffer.dtype)
                child._buffers[name] = buffer.to(device, dtype if buffer.is_floating_point() else None)


def _check_convertible(unit: Unit, fn: Conversion) -> None:
    if unit.backward_unobserved or (unit.root is not None and not unit.root.synchronizes):
        raise RuntimeError(
            f"to(), half() and the like: the parameters of {unit_title(unit.name)} are between a forward and its "
            "backward, or inside no_sync(): convert the model before or after"
        )
    for buffer in unit.buffers:
        after = fn(buffer.shard.new_empty(0))
        device = after.device
        if unit.options.placement.params_on_host and device.type not in ("cpu", "meta") and not buffer.is_meta:
            raise RuntimeError(
                f"the shards of {unit_title(unit.name)} are kept on the host by offload_policy=CPUOffloadPolicy(), and "
                f"can't go to {device}: it computes on {buffer.compute_device}; "
                "fully_shard(..., options=ShardOptions(compute_device=...)) sets it"
            )


@on_local_tensors
def _convert_flat_buffer(unit: Unit, buffer: FlatBuffer, fn: Conversion) -> bool:
    """Converts one flat buffer and the gradients of its parameters; returns whether anything has changed."""
    shard = fn(buffer.shard)
    if shard is buffer.shard:
        return False
    was_meta, gradient = buffer.is_meta, buffer.gradient
    grads = [None if param.grad is None else fn(param.grad) for param in buffer.sharded_params]
    devices = _devices_after(unit, buffer, shard.device)
    if shard.device != devices.shard:  # Asked for where it computes, but its shards are on the host.
        shard = torch.empty_like(shard, device=devices.shard)
    if was_meta and not shard.is_meta and buffer is unit.buffers[0]:
        unit.options.check_groups()
    groups = unit.options.buffer_groups() if was_meta else None
    buffer.set_storage(shard, groups=groups, devices=devices)
    for param, grad in zip(buffer.sharded_params, grads, strict=True):
        param.grad = grad
    buffer.gradient.adopt(gradient, buffer.compute_device)
    if was_meta and not buffer.is_meta:
        track_uninitialized_shard(buffer)
    return True


def _devices_after(unit: Unit, buffer: FlatBuffer, device: torch.device) -> DevicePolicy:
    placement = unit.options.placement
    if device == buffer.devices.shard:
        return buffer.devices
    if device.type == "meta":
        return DevicePolicy(device, device, device)
    if not buffer.is_meta and placement.compute is not None:
        placement = replace(placement, compute=device)
        unit.options = replace(unit.options, placement=placement)
    return placement.devices_for(device)


@contextmanager
def _without_params(unit: Unit) -> Iterator[None]:
    """Inside, the unit's modules have no parameters of it: torch would convert each shard by itself."""
    unit.set_flat_params(shown=False)
    for module, attribute, _, _ in unit.slots:
        if attribute in module._parameters:
            module._parameters[attribute] = None
    try:
        yield
    finally:
        rebind_params([unit])
