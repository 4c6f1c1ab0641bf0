"""Errors where a parameter or a module is put into a sharded model.

A unit knows its parameters from the time of its sharding. One that is assigned later would be overwritten when the unit
is gathered; one in a module that is assigned later would be neither sharded nor reduced, and the ranks would train
different models. torch calls whoever asks for every assignment of either kind, so the error comes from the line that
makes it, and a step pays nothing. Only `param.data = ...` it tells nobody: that is looked for when a unit runs.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from scale_core.events import unit_title
from scale_fsdp.slots import paths_in
from scale_fsdp.unit import Unit, unit_of

_unit_around: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Unit]] = weakref.WeakKeyDictionary()


def refuse_assignments(unit: Unit) -> None:
    """From now on, refuses new parameters, modules with parameters, and other memory for the unit's parameters."""
    watch_modules(unit)
    unit.module.register_forward_pre_hook(functools.partial(_before_forward, unit))


def watch_modules(unit: Unit) -> None:
    """From now on, refuses new parameters and modules with parameters: in a new unit, or in a copy of one."""
    _watch_registrations()
    for module in _modules_of(unit):
        _unit_around[module] = weakref.ref(unit)


def check_memory(unit: Unit) -> None:
    """Checks that what an optimizer has of the unit's parameters is the memory that they are gathered from.

    Raises:
        RuntimeError: Somebody has assigned to `param.data`, as `resize_token_embeddings` of transformers does.
    """
    if torch.compiler.is_compiling():
        return  # A compiler can't follow it, and would break its graph here.
    for buffer in unit.buffers:
        storage = buffer.shard.untyped_storage()
        for index, param in enumerate(buffer.exposed):
            if param.untyped_storage() is not storage:
                name = "flat_param" if buffer.flatten else buffer.names[index]
                raise RuntimeError(
                    f"'{name}' of {unit_title(unit.name)} has got other memory since it was sharded, by param.data = "
                    "..., so that training it would change nothing: resize embeddings and the like before "
                    "fully_shard(...), and write values in place, with torch.no_grad(): param.copy_(values)"
                )


def _modules_of(unit: Unit) -> Iterator[nn.Module]:
    """The unit's module and what is in it, without the nested units."""
    seen: set[nn.Module] = set()
    waiting = [unit.module]
    while waiting:
        module = waiting.pop()
        if module not in seen and unit_of(module) in (None, unit):
            seen.add(module)
            yield module
            # A module that is being copied or read from a file may have none yet.
            waiting += module.children() if "_modules" in vars(module) else ()


def _before_forward(unit: Unit, *_: object) -> None:
    check_memory(unit)


@functools.cache
def _watch_registrations() -> None:
    register_module_parameter_registration_hook(_on_parameter)
    register_module_module_registration_hook(_on_module)


def _unit_of_any(module: nn.Module) -> Unit | None:
    found = _unit_around.get(module)
    return None if found is None else found()


def _on_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    unit = _unit_of_any(module)
    # Modules such as nn.LSTM are given the unit's own tensors by assignment.
    if unit is None or param is None or type(module).__setattr__ is not nn.Module.__setattr__:
        return
    here = [slot for slot in unit.slots if slot.module is module and slot.attribute == name]
    if any(param is slot.buffer.exposed_of(slot.number) or param is slot.buffer.wholes[slot.number] for slot in here):
        return
    raise RuntimeError(
        f"{_place(unit, module, name)} was given another parameter after {unit_title(unit.name)} was sharded, and "
        "would have the old one again at the next forward: assign it, or tie it, before fully_shard(...); to change "
        f"its values, write with torch.no_grad(), model.summon_full_params(): module.{name}.copy_(values)"
    )


def _on_module(module: nn.Module, name: str, child: nn.Module | None) -> None:
    unit = _unit_of_any(module)
    if unit is None or child is None:
        return
    # What is sharded already may move; what has no parameters has nothing to shard.
    new = [part for part in child.modules() if part._parameters and _unit_of_any(part) is None]
    if any(param is not None for part in new for param in part._parameters.values()):
        raise RuntimeError(
            f"{_place(unit, module, name)} was given a new {type(child).__name__} after {unit_title(unit.name)} was "
            "sharded, so its parameters would be neither sharded nor averaged over the ranks: change the model (resize "
            "its embeddings, add adapters, convert its norms) before fully_shard(...)"
        )
    for part in child.modules():  # What is put into it later is put into the unit.
        _unit_around.setdefault(part, weakref.ref(unit))


def _place(unit: Unit, module: nn.Module, name: str) -> str:
    path = paths_in(unit.module).get(id(module), "")
    return f"'{'.'.join(filter(None, [unit.name, path, name]))}'"
