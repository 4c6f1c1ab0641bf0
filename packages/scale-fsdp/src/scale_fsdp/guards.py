"""Errors in place of nonsense when a unit's parameters would be used, changed or copied past the unit.

`model.lm_head(hidden)` or `model.forward(ids)` would compute with local shards: wrong shapes at best, and a lookup in
this rank's rows of an embedding at worst, which is a number and not an error. `model.half()` would change the shards
behind the back of their buffer. So whoever holds a unit's parameters asks, before it goes on, whether that is right.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from scale_core.consistency.execution_order import unit_title
from scale_fsdp.step import abort_on_interrupt
from scale_fsdp.unit import Unit, paths_in, unit_of

# Errors where a parameter or a module is put into a sharded model.
#
# A unit knows its parameters from the time of its sharding. One that is assigned later would be overwritten when the
# unit is gathered; one in a module that is assigned later would be neither sharded nor reduced, and the ranks would
# train different models. torch calls whoever asks for every assignment of either kind, so the error comes from the line
# that makes it, and a step pays nothing. Only `param.data = ...` it tells nobody: that is looked for when a unit runs.

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


def guard_modules(unit: Unit) -> None:
    """Makes each module in the unit, other than the unit's own, refuse to run on shards, and all refuse new ones."""
    refuse_assignments(unit)
    guarded = {id(slot.module): slot.module for slot in unit.slots if slot.module is not unit.module}
    for module in guarded.values():
        module.register_forward_pre_hook(_Guard(unit), prepend=True)


class _Guard:
    """What runs before the forward of a module in a unit."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(self, module: nn.Module, _: object) -> None:
        refuse_shards(self.unit, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Guard:
        """Copies the guard with its unit, never the unit for the guard's sake.

        Raises:
            TypeError: A module is being copied out of its unit.
        """
        if id(self.unit) not in memo:
            raise TypeError(
                f"a module in {unit_title(self.unit.name)} can't be copied without that unit's "
                f"{type(self.unit.module).__name__}, which gathers its parameters: copy that, or make the module a "
                "unit of its own by fully_shard(module) before the modules around it"
            )
        return _Guard(memo[id(self.unit)])


def guarded_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns the class's forward, made to refuse to run on shards, and to end its pass where it is interrupted."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        if unit is not None and any(slot.module is self for slot in unit.slots):
            refuse_shards(unit, self)
        try:
            return cls.forward(self, *args, **kwargs)
        except BaseException as error:
            if unit is not None:
                abort_on_interrupt(unit, error)
            raise

    return forward


def refuse_shards(unit: Unit, module: nn.Module) -> None:
    """Refuses to let `module`, which holds parameters of `unit`, compute while they are sharded.

    Raises:
        RuntimeError: They are, and this is not a world of one.
    """
    if (
        unit.use_count
        or unit.in_backward
        or unit.in_summon
        or unit.kept_unsharded
        or all(buffer.group.size == 1 for buffer in unit.buffers)
    ):
        return
    attributes = ", ".join(slot.attribute for slot in unit.slots if slot.module is module)
    outermost = type(unit.root.outermost.module if unit.root else unit.module).__name__
    method = _method_that_runs(unit)
    register = f"register_forward_method(module, {method!r}) if that is to run as its forward does, " if method else ""
    raise RuntimeError(
        f"a {type(module).__name__} of {unit_title(unit.name)} was called {f'by {method}() ' if method else ''}outside "
        f"of the unit's forward, where its parameters ({attributes}) are sharded: {register}call the {outermost} "
        "itself, model(...), make the part a unit of its own by fully_shard(...) before the modules around it, or call "
        "it inside summon_full_params()"
    )


def _method_that_runs(unit: Unit) -> str:
    """The method of the unit's module, other than forward, in which this was called; the outermost, "" for none."""
    found = ""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_code.co_name
        is_method = name.isidentifier() and getattr(type(unit.module), name, None) is not None
        # The list begins with the arguments, whatever the first is called.
        own = frame.f_locals.get(frame.f_code.co_varnames[0]) if frame.f_code.co_varnames else None
        if is_method and own is unit.module and not hasattr(nn.Module, name):
            found = name
    return found


def refuse_in_use(units: Iterable[Unit], what: str) -> None:
    """Refuses to change or copy parameters that somebody computes with, or looks at, as a whole.

    Where shards on the host are still being copied to the device, it waits: from then on they may be changed.

    Raises:
        RuntimeError: That is so.
    """
    for unit in units:
        if unit.root is not None:
            unit.root.recover()
        if unit.use_count or unit.in_backward or unit.in_summon or unit.kept_unsharded:
            raise RuntimeError(
                f"{what}: the parameters of {unit_title(unit.name)} are in use, by a forward or backward pass, inside "
                "summon_full_params or gathered by hand: call it between steps"
            )
        for buffer in unit.buffers:
            buffer.wait_sent()
