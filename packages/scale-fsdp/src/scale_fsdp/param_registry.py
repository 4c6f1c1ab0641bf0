"""Where a module's parameters stand before it is sharded, and where those are found that were sharded already."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.state.param_ownership import tell_flat
from scale_fsdp.unit import Unit, unit_of


class ParamPlace(NamedTuple):
    """One place in the module tree that holds a parameter."""

    name: str
    module: nn.Module
    attribute: str
    param: nn.Parameter


class Home(NamedTuple):
    """Where a parameter that was sharded already lives.

    Attributes:
        ref: Its unit, which holds the parameter, and must not be kept alive by it.
        buffer: The number of its buffer there.
        number: Its own in that.
    """

    ref: weakref.ref[Unit]
    buffer: int
    number: int

    @property
    def unit(self) -> Unit:
        """Its unit."""
        unit = self.ref()
        assert unit is not None, "asked for the unit of a parameter that has none any more"
        return unit


# Original parameters, and the local shards that took their place, to the unit that owns them: so that one which is
# shared between units is found again, whatever object the other unit still holds.
_homes: WeakIdKeyDictionary = WeakIdKeyDictionary()


def modules_of_unit(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields a module and what is in it, with their names, outside of the units in it."""
    seen = set()
    stack = [(path, module)]
    while stack:
        here, current = stack.pop()
        if id(current) in seen or (current is not module and unit_of(current) is not None):
            continue
        seen.add(id(current))
        yield here, current
        children = [
            (f"{here}.{name}".lstrip("."), child) for name, child in current._modules.items() if child is not None
        ]
        stack.extend(reversed(children))


def param_places(module: nn.Module) -> Iterator[ParamPlace]:
    """Yields each place outside of nested units that holds a parameter; a shared one stands in several."""
    for path, child in modules_of_unit(module):
        for attribute, param in child._parameters.items():
            if param is not None:
                yield ParamPlace(f"{path}.{attribute}".lstrip("."), child, attribute, param)


def own_and_borrowed(places: Sequence[ParamPlace]) -> tuple[list[ParamPlace], list[tuple[ParamPlace, Home]]]:
    """Tells those that were not sharded yet from those that another unit has."""
    own, borrowed = [], []
    for place in places:
        home: Home | None = _homes.get(place.param)
        if home is None or home.ref() is None:
            own.append(place)
        else:
            borrowed.append((place, home))
    return own, borrowed


def remember(unit: Unit, own: Sequence[ParamPlace] = ()) -> None:
    """Makes it known where the parameters of a unit live: a new one, a copy, or one that has moved.

    Args:
        unit: The unit.
        own: The places of its original parameters, in the order of its slots.
    """
    numbers = {id(buffer): number for number, buffer in enumerate(unit.buffers)}
    for place, slot in zip(own, unit.slots, strict=False):
        _homes[place.param] = Home(weakref.ref(unit), numbers[id(slot.buffer)], slot.number)
    for buffer in unit.buffers:
        if buffer.flatten:
            tell_flat(buffer)
            continue
        for number, param in enumerate(buffer.exposed):
            _homes[param] = Home(weakref.ref(unit), numbers[id(buffer)], number)
