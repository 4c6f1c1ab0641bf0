"""Errors in place of nonsense when a unit's parameters would be used, changed or copied past the unit.

`model.lm_head(hidden)` or `model.forward(ids)` would compute with local shards: wrong shapes at best, and a lookup in
this rank's rows of an embedding at worst, which is a number and not an error. `model.half()` would change the shards
behind the back of their buffer. So whoever holds a unit's parameters asks, before it goes on, whether that is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from scale_core.events import unit_title
from scale_fsdp.unit import Unit, unit_of


def guard_modules(unit: Unit) -> None:
    """Makes each module in the unit, other than the unit's own, refuse to run on shards."""
    guarded = {id(slot.module): slot.module for slot in unit.slots if slot.module is not unit.module}
    for module in guarded.values():
        module.register_forward_pre_hook(lambda module, _: refuse_shards(unit, module), prepend=True)


def guarded_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns the class's forward, made to refuse to run on shards where it was not called through the module."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit = unit_of(self)
        if unit is not None and any(slot.module is self for slot in unit.slots):
            refuse_shards(unit, self)
        return cls.forward(self, *args, **kwargs)

    return forward


def refuse_shards(unit: Unit, module: nn.Module) -> None:
    """Refuses to let `module`, which holds parameters of `unit`, compute while they are sharded.

    Raises:
        RuntimeError: They are, and this is not a world of one.
    """
    if unit.uses or unit.in_backward or unit.summoned or all(buffer.group.size == 1 for buffer in unit.buffers):
        return
    attributes = ", ".join(slot.attribute for slot in unit.slots if slot.module is module)
    outermost = type(unit.root.outermost.module if unit.root else unit.module).__name__
    raise RuntimeError(
        f"a {type(module).__name__} of {unit_title(unit.name)} was called outside of the unit's forward, where its "
        f"parameters ({attributes}) are sharded: call the {outermost} itself, model(...), make the part a unit of its "
        "own by fully_shard(...) before the modules around it, or call it inside summon_full_params()"
    )


def refuse_conversion(unit: Unit, convert: Callable[[Tensor], Tensor]) -> None:
    """Refuses `half()`, `to()` and the like where they would change a unit's shards.

    Raises:
        RuntimeError: They would.
    """
    for buffer in unit.buffers:
        probe = buffer.shard.new_empty(0)
        converted = convert(probe)
        if converted.dtype != probe.dtype or converted.device != probe.device:
            raise RuntimeError(
                f"the parameters of {unit_title(unit.name)} are sharded in {probe.dtype} on {probe.device} and can't "
                f"become {converted.dtype} on {converted.device} now: convert the model before fully_shard(model), or "
                "let it compute in another dtype by fully_shard(model, mixed_precision=MixedPrecision(param_dtype=...))"
            )


def refuse_copy(module: nn.Module) -> None:
    """Refuses to deepcopy or pickle a sharded module.

    Raises:
        TypeError: Always.
    """
    raise TypeError(
        f"a sharded {type(module).__name__} can't be copied or pickled: copy the plain module before fully_shard(...), "
        "or load_state_dict(sharded.state_dict()) into a new one"
    )
