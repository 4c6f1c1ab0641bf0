"""The parameters that a module manages before it is sharded, and the owners of those that were sharded already.

As in FSDP2, a unit manages the modules and parameters that are in it and in none of the units inside it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from scale_core.records import ParamRecord
from scale_core.state.param_ownership import register_flat_param
from scale_fsdp.runtime.unit import Unit, unit_of


class ParamModuleInfo(NamedTuple):
    """One place in the module tree that holds a parameter."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


class ParamOwner(NamedTuple):
    """The unit that a parameter belongs to, the number of its buffer there, and its own number in that."""

    ref: weakref.ref[Unit]  # The unit holds the parameter, and must not be kept alive by it.
    buffer: int
    number: int

    @property
    def unit(self) -> Unit:
        """The unit."""
        unit = self.ref()
        assert unit is not None, "asked for the unit of a parameter that has none any more"
        return unit


def managed_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and the modules in it, with their names, but for units in it."""
    seen = set()
    stack = [(path, module)]
    while stack:
        prefix, current = stack.pop()
        if id(current) in seen or (current is not module and unit_of(current) is not None):
            continue
        seen.add(id(current))
        yield prefix, current
        children = [
            (f"{prefix}.{name}".lstrip("."), child) for name, child in current._modules.items() if child is not None
        ]
        stack.extend(reversed(children))


def managed_params(module: nn.Module, prefix: str = "") -> Iterator[ParamModuleInfo]:
    """Yields each place outside of nested units that holds a parameter; a shared one stands in several."""
    for path, child in managed_modules(module, prefix):
        for attribute, param in child._parameters.items():
            if param is not None:
                yield ParamModuleInfo(f"{path}.{attribute}".lstrip("."), child, attribute, param)


def split_owned_and_shared(
    infos: Sequence[ParamModuleInfo],
) -> tuple[list[ParamModuleInfo], list[tuple[ParamModuleInfo, ParamOwner]]]:
    """Splits parameters into those that were not sharded yet, and those that another unit owns."""
    owned, shared = [], []
    for info in infos:
        record = ParamRecord.get(info.param)
        owner: ParamOwner | None = None if record is None else record.param_owner
        if owner is None or owner.ref() is None:
            owned.append(info)
        else:
            shared.append((info, owner))
    return owned, shared


def register_owner(unit: Unit, original: Sequence[nn.Parameter] = ()) -> None:
    """Registers a new, copied or moved unit as the owner of its parameters; of those that stood in its slots, too.

    So one that is shared between units is found again, whichever object the other unit still holds.
    """
    numbers = {id(buffer): number for number, buffer in enumerate(unit.buffers)}
    for param, slot in zip(original, unit.slots, strict=False):
        ParamRecord.get_or_create(param).param_owner = ParamOwner(
            weakref.ref(unit), numbers[id(slot.buffer)], slot.number
        )
    for buffer in unit.buffers:
        if buffer.flatten:
            register_flat_param(buffer)
            continue
        for number, param in enumerate(buffer.sharded_params):
            ParamRecord.get_or_create(param).param_owner = ParamOwner(weakref.ref(unit), numbers[id(buffer)], number)
