"""Checks around a unit: rules that a program could otherwise break in silence, and the texts of their errors.

Functions that return an error are called where the step has found a mistake; the others look for it themselves, at
construction, before a conversion, or when the user has changed something. On a steady step none of them is called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.comm.group import Group
from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_core.records import Record
from scale_fsdp.runtime.flattened_parameter import flat_param_name
from scale_fsdp.runtime.param_registry import managed_modules
from scale_fsdp.runtime.unit import ParamSlot, RegisteredNames, Unit
from scale_fsdp.transports.policy import wire_formats

# Errors that a step raises.


def trains_in_summon(unit: Unit) -> RuntimeError:
    """Full parameters inside `summon_full_params` get no gradients."""
    return RuntimeError(
        f"{unit_title(unit.name)} was called with gradients enabled inside summon_full_params, whose tensors no "
        "optimizer knows: call it under torch.no_grad(), or outside"
    )


def param_replaced(unit: Unit, slot: ParamSlot) -> RuntimeError:
    """Gathered parameters would be put over a tensor that somebody else has put there."""
    name = slot.buffer.names[slot.number]
    return RuntimeError(
        f"'{name}' was replaced by a different tensor, by an assignment or by torch.func.functional_call, and "
        f"{unit_title(unit.name)} would compute with the sharded one: assign or tie it before fully_shard(...), or "
        "write the values: with torch.no_grad(), model.summon_full_params(): param.copy_(values)"
    )


def check_not_replaced(units: Iterable[Unit]) -> None:
    """Refuses to put shards or gathered parameters over a parameter that the user has assigned."""
    for unit in units:
        if not unit.in_summon and (slot := unit.replaced_slot()) is not None:
            raise param_replaced(unit, slot)


def params_overwritten(unit: Unit) -> RuntimeError:
    """A unit computes with a gathered copy of its shards, and writes to the copy are lost."""
    names = next(buffer.names for buffer in unit.buffers if buffer.is_overwritten)
    some = ", ".join(f"'{name}'" for name in names[:4]) + (", ..." if len(names) > 4 else "")
    return RuntimeError(
        f"{some if len(names) == 1 else f'one of {some}'} was written to in place while {unit_title(unit.name)} ran, "
        "as nn.Embedding(max_norm=...) does, and the change would be lost with the gathered copy: change parameters "
        "between steps inside model.summon_full_params(), or leave the module that holds it unsharded"
    )


def changed_before_backward(unit: Unit) -> RuntimeError:
    """Autograd's own rule: tensors that a forward has used must not change before its backward."""
    return RuntimeError(
        f"the parameters of {unit_title(unit.name)} were changed between its forward and its backward, by an "
        "optimizer step, load_state_dict, a conversion or another in-place operation: call loss.backward() first"
    )


def second_derivative(unit: Unit) -> RuntimeError:
    """A graph through a backward pass would need parameters that are released after it."""
    return RuntimeError(
        f"a backward pass with create_graph=True has come to {unit_title(unit.name)}, whose parameters are released "
        "after it, so that no second derivative can be taken: leave create_graph=True out, or the module unsharded"
    )


def captured_in_graph(unit: Unit) -> RuntimeError:
    """A replay would repeat the kernels, and none of what the ranks compare on the host."""
    return RuntimeError(
        f"the forward of {unit_title(unit.name)} runs while a CUDA graph is captured. A replay would gather parameters "
        "without comparing what the ranks do, and read memory that was released since. Capture modules that are not "
        "sharded, or call the model outside of torch.cuda.graph(...)"
    )


def hook_on_shard(buffer: FlatBuffer, index: int) -> RuntimeError:
    """A hook of `register_hook` on a shard would never be called: autograd computes gradients of full parameters."""
    return RuntimeError(
        f"a hook is registered on the local shard of '{buffer.names[index]}', and would never be called: see gradients "
        "before they are reduced by scale_core.hooks.gradients.register_local_grad_hook(...), and after it by "
        "param.register_post_accumulate_grad_hook(...) or in param.grad"
    )


def data_replaced(unit: Unit, buffer: FlatBuffer, index: int) -> RuntimeError:
    """An optimizer would train memory that is never gathered."""
    name = "flat_param" if buffer.flatten else buffer.names[index]
    return RuntimeError(
        f"'{name}' of {unit_title(unit.name)} has different memory than when it was sharded, by param.data = ..., so "
        "it would not be trained: resize embeddings before fully_shard(...), and write values by param.copy_(values)"
    )


def prefetch_of_another_model(unit: Unit, other: Unit) -> ValueError:
    """Units of another model are not gathered in this one's order."""
    return ValueError(
        f"{unit_title(unit.name)} was told to prefetch a {type(other.module).__name__} that is not in this model: "
        "pass modules of the same model to set_modules_to_forward_prefetch(...) and to the one for backward"
    )


def copied_without_unit(unit: Unit) -> TypeError:
    """A module without the unit that gathers its parameters would compute with shards."""
    return TypeError(
        f"a module in {unit_title(unit.name)} can't be copied without that unit's {type(unit.module).__name__}, which "
        "gathers its parameters: copy that, or call fully_shard(module) before the modules around it are sharded"
    )


def check_not_sharded(unit: Unit, module: nn.Module) -> None:
    """Refuses to let `module`, which holds parameters of `unit`, compute while they are sharded.

    `model.lm_head(hidden)` and `model.forward(ids)` would compute with local shards: wrong shapes at best, and a lookup
    in this rank's rows of an embedding at worst.
    """
    attributes = ", ".join(slot.attribute for slot in unit.slots if slot.module is module)
    if not attributes or _in_use(unit) or all(buffer.group.size == 1 for buffer in unit.buffers):
        return
    outermost = type(unit.root.outermost.module if unit.root else unit.module).__name__
    raise RuntimeError(
        f"a {type(module).__name__} of {unit_title(unit.name)} was called outside of the unit's forward, where its "
        f"parameters ({attributes}) are sharded: call the {outermost} itself, model(...). Where a method of it has "
        "called this, register_fsdp_forward_method(model, 'the method') lets that run as the forward does; otherwise "
        "make the part a unit of its own by fully_shard(...), or call it inside summon_full_params()"
    )


def check_not_in_use(units: Iterable[Unit], what: str) -> None:
    """Refuses to change or copy parameters that are gathered for a pass or by hand; waits for copies of the shards."""
    for unit in units:
        if unit.root is not None:
            unit.root.recover()
        if _in_use(unit):
            raise RuntimeError(
                f"{what}: the parameters of {unit_title(unit.name)} are in use, by a forward or backward pass, inside "
                "summon_full_params or gathered by hand: call it between steps"
            )
        for buffer in unit.buffers:
            buffer.wait_sent()


def _in_use(unit: Unit) -> bool:
    return bool(unit.use_count or unit.in_backward or unit.in_summon or unit.kept_unsharded)


def check_registered(unit: Unit) -> None:
    """Refuses parameters in the unit's modules that are not its own, and remembers the content of the modules.

    One that was put in after the sharding, or a module with such, would be neither sharded nor reduced, and the ranks
    would train different models.
    """
    slot_keys = {(id(slot.module), slot.attribute) for slot in unit.slots}
    slot_keys |= {(id(unit.module), flat_param_name(number)) for number in range(len(unit.buffers))}
    ignored = set(unit.ignored)
    registered = []
    for path, module in (
        named_module for root_module in unit.modules for named_module in managed_modules(root_module, unit.name)
    ):
        registered.append(RegisteredNames.of(module))
        names = (name for name in registered[-1].params if module._parameters[name] not in ignored)
        new = [name for name in names if (id(module), name) not in slot_keys]
        if new:
            raise RuntimeError(
                f"'{f'{path}.{new[0]}'.lstrip('.')}' was put into {unit_title(unit.name)} after that was sharded, so "
                "it would be neither sharded nor averaged: change the model (tie, add adapters) before fully_shard(...)"
            )
    unit.registered = registered


# Memory that was allocated and not written to.
#
# Tensors from the meta device have no values. torch fills its memory later, by an initialization or a checkpoint, and
# says nothing where either of them leaves something out: the values that `__init__` computes for a buffer are in no
# checkpoint.


class Uninitialized(NamedTuple):
    """Memory that something must still be written to: NaN throughout, where its dtype has that."""

    tensor: Tensor
    version: int  # before anybody wrote to it

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Uninitialized:
        if tensor.is_floating_point() and tensor.itemsize > 1:
            tensor.fill_(torch.nan)
        return cls(tensor, tensor._version)

    def is_filled(self, now: Tensor | None) -> bool:
        """Whether its place now has a different tensor, or the same one after a write."""
        if now is not self.tensor or not self.tensor.numel() or self.tensor._version != self.version:
            return now is not None and not now.is_meta
        # A write to `tensor.data` leaves no trace but the values; a simulation has none to look at.
        if not self.tensor.is_floating_point() or self.tensor.itemsize == 1:
            return False
        return compat.active_fake_mode() is not None or not bool(self.tensor.isnan().all())


# Tensors that `to_empty` has given memory, until somebody writes to them.


class _UninitializedBuffers(Record):
    """The buffers of a module that `to_empty` has allocated and nobody has written to, by name."""

    attribute = "_scale_uninitialized_buffers"

    def __init__(self) -> None:
        self.by_name: dict[str, Uninitialized] = {}


class _UninitializedShard(Record):
    """The version of a shard that nobody has written to since it was allocated; None afterwards."""

    attribute = "_scale_uninitialized_shard"
    version: int | None = None


def track_uninitialized_buffers(module: nn.Module, before: Mapping[str, Tensor | None]) -> None:
    """Records which buffers of a module, on meta `before`, have got memory and no values."""
    for name, old in before.items():
        now = module._buffers.get(name)
        if old is not None and old.is_meta and now is not None and not now.is_meta:
            _UninitializedBuffers.get_or_create(module).by_name[name] = Uninitialized.of(now)


def track_uninitialized_shard(buffer: FlatBuffer) -> None:
    """Records that a shard from the meta device has got memory and no values."""
    Uninitialized.of(buffer.shard)
    _UninitializedShard.get_or_create(buffer).version = buffer.version


def check_initialized(unit: Unit) -> None:
    """Refuses to compute with tensors that have no values."""
    for buffer in unit.buffers:
        if buffer.is_meta:
            raise RuntimeError(
                f"'{buffer.names[0]}' of {unit_title(unit.name)} is on the meta device and has no values to compute "
                "with: call model.to_empty(device=...) and load a checkpoint, or shard the model without "
                "ShardOptions(init=False)"
            )
        shard = _UninitializedShard.get(buffer)
        if shard is not None and shard.version == buffer.version:
            raise RuntimeError(
                f"nothing was written to '{buffer.names[0]}' of {unit_title(unit.name)} since it was on the meta "
                "device: load a checkpoint first, model.load_state_dict(...) or load_snapshot(...)"
            )
        if shard is not None:
            shard.version = None
    for path, module in (
        named_module for root_module in unit.modules for named_module in root_module.named_modules(prefix=unit.name)
    ):
        record = _UninitializedBuffers.get(module)
        tracked = {} if record is None else record.by_name
        for attribute, uninitialized in list(tracked.items()):
            if not uninitialized.is_filled(module._buffers.get(attribute)):
                raise RuntimeError(
                    f"the buffer '{f'{path}.{attribute}'.lstrip('.')}' has had no values since it was on the meta "
                    "device, and the checkpoint has none for it: write what its module's __init__ computes, "
                    f"module.{attribute}.copy_(...), or build that module outside of torch.device('meta')"
                )
            del tracked[attribute]


# The facts that must be equal on all ranks before the units of a model run.


def check_units(units: Sequence[Unit], group: Group) -> None:
    """Checks that the units of one model, which `group` shares, can run together."""
    for unit in units:
        check_initialized(unit)
        check_registered(unit)
        for owner in unit.shared_owners:
            if owner not in units:
                raise ValueError(
                    f"a {type(unit.module).__name__} shares a parameter with a {type(owner.module).__name__} that is "
                    "sharded too, but no sharded module holds both: call fully_shard on the module around them"
                )
        ranks = unit.options.mesh_info.whole
        if unit.buffers and ranks.size > 1 and ranks.ranks != group.ranks and not is_on_an_axis(unit, group):
            raise ValueError(
                f"{unit_title(unit.name)} is sharded over ranks {list(ranks.ranks)} and the rest over "
                f"{list(group.ranks)}: pass one mesh to every fully_shard of a model"
            )


def is_on_an_axis(unit: Unit, group: Group) -> bool:
    """Whether a unit is over some of the model's ranks, and its layer has divided all of it between the others."""
    fsdp_group = unit.options.mesh_info.whole  # `Group()` is this rank alone, whatever its number.
    is_part = fsdp_group.size == 1 < group.size or set(fsdp_group.ranks) < set(group.ranks)
    return is_part and all(buffer.holds_pieces for buffer in unit.buffers)


def describe_units(units: Sequence[Unit], group: Group) -> list[str]:
    """Returns all that decides the messages of the units, a line each, to compare before the first gather.

    Ranks that would cut, cast or prefetch differently read each other's bytes as something else. What a unit over some
    of the ranks holds was compared between those when it was sharded: other ones may have more experts.
    """
    lines = []
    for unit in units:
        title = unit.name or "root"
        for buffer in () if is_on_an_axis(unit, group) else unit.buffers:
            lines += [
                f"{title}: {name.removesuffix(unit.rank_suffix)} {entry.shape} {buffer.dtype} "
                f"trains={buffer.sharded_param(index).requires_grad} cut at {entry.cut}"
                for index, (name, entry) in enumerate(zip(buffer.names, buffer.layout.entries, strict=True))
            ]
            lines.append(
                f"{title}: computes in {buffer.compute_dtype}, reduces in {buffer.reduce_dtype}, "
                f"flatten={buffer.flatten}, layout {buffer.layout.digest()}, sent in {wire_formats(buffer)}"
            )
        lines.append(
            f"{title}: over {unit.options.mesh_info.replicas.size} x {unit.options.mesh_info.shard.size} ranks, "
            f"reshard_after_forward={unit.options.reshard_after_forward}, {len(unit.modules)} modules, "
            f"check_replicas_every={unit.options.check_replicas_every}, {unit.options.communication}, "
            f"shares with {[owner.name for owner in unit.shared_owners]}"
        )
    return lines


def log_plan(logger: logging.Logger, units: Sequence[Unit]) -> None:
    """Logs the number of units and the memory that they take."""
    outermost, buffers = units[0], [buffer for unit in units for buffer in unit.buffers]
    gathered = [sum(b.layout.full_numel * b.full.dtype.itemsize for b in unit.buffers) for unit in units]
    largest = gathered.index(max(gathered))
    mesh = outermost.options.mesh_info
    logger.info(
        "fully_shard of %s: %d units over %d ranks%s, %d parameters, %d bytes of shards on this rank; the largest "
        "is %s with %d bytes while it is gathered",
        type(outermost.module).__name__,
        len(units),
        mesh.shard.size,
        f" in {mesh.replicas.size} copies" if mesh.replicas.size > 1 else "",
        sum(len(buffer.names) for buffer in buffers),
        sum(buffer.shard.nbytes for buffer in buffers),
        unit_title(units[largest].name),
        gathered[largest],
    )
