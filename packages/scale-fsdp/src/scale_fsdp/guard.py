"""Errors in place of nonsense when a module inside a unit is called past the unit.

`model.lm_head(hidden)` or `model.model(ids)` would compute with local shards: wrong shapes at best, and a lookup in
this rank's rows of an embedding at worst, which is a number and not an error. So the modules that hold a unit's
parameters ask, before they run, whether these are whole.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from scale_core.contract import unit_title
from scale_fsdp.unit import Unit


def guard_modules(unit: Unit) -> None:
    """Makes each module in the unit, other than the unit's own, refuse to run on shards."""
    guarded = {id(slot.module): slot.module for slot in unit.slots if slot.module is not unit.module}
    for module in guarded.values():
        module.register_forward_pre_hook(_refuse_shards(unit), prepend=True)


def _refuse_shards(unit: Unit) -> Any:
    def refuse(module: nn.Module, _: Any) -> None:
        if unit.uses or unit.in_backward or unit.summoned or all(buffer.is_aliased for buffer in unit.buffers):
            return
        attributes = [slot.attribute for slot in unit.slots if slot.module is module]
        outermost = type(unit.root.outermost.module if unit.root else unit.module).__name__
        raise RuntimeError(
            f"a {type(module).__name__} of {unit_title(unit.name)} was called outside of the unit's forward, where its "
            f"parameters ({', '.join(attributes)}) are sharded: call it through the {outermost}'s own forward, make it "
            "a unit of its own by fully_shard(...) before the modules around it, or call it inside summon_full_params()"
        )

    return refuse
