"""Errors in place of nonsense when a unit's parameters would be used, changed or copied past the unit.

`model.lm_head(hidden)` or `model.forward(ids)` would compute with local shards: wrong shapes at best, and a lookup in
this rank's rows of an embedding at worst, which is a number and not an error. `model.half()` would change the shards
behind the back of their buffer. So whoever holds a unit's parameters asks, before it goes on, whether that is right.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from scale_core.events import unit_title
from scale_fsdp.assignments import refuse_assignments
from scale_fsdp.interrupts import end_where_interrupted
from scale_fsdp.unit import Unit, unit_of


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
        except Exception:
            raise  # torch calls the unit.
        except BaseException as error:
            if unit is not None:
                end_where_interrupted(unit, error)
            raise

    return forward


def refuse_shards(unit: Unit, module: nn.Module) -> None:
    """Refuses to let `module`, which holds parameters of `unit`, compute while they are sharded.

    Raises:
        RuntimeError: They are, and this is not a world of one.
    """
    if (
        unit.uses
        or unit.in_backward
        or unit.summoned
        or unit.pinned
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
        if unit.uses or unit.in_backward or unit.summoned or unit.pinned:
            raise RuntimeError(
                f"{what}: the parameters of {unit_title(unit.name)} are in use, by a forward or backward pass, inside "
                "summon_full_params or gathered by hand: call it between steps"
            )
        for buffer in unit.buffers:
            buffer.wait_sent()
