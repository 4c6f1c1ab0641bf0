"""Where a unit's parameters stand in the module tree, and how one tensor takes another's place there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from scale_core.flat import FlatBuffer


class Slot(NamedTuple):
    """A place in the module tree where a parameter stands: `module.attribute`."""

    module: nn.Module
    attribute: str
    buffer: FlatBuffer
    number: int


def show_shards(slots: Iterable[Slot]) -> None:
    """Puts the local shards into the module: what everybody sees outside of its forward and backward."""
    for module, attribute, buffer, number in slots:
        put(module, attribute, None if buffer.flatten else buffer.exposed[number])


def show_wholes(slots: Iterable[Slot]) -> None:
    """Puts the whole parameters into the module: what it computes with."""
    for module, attribute, buffer, number in slots:
        put(module, attribute, buffer.wholes[number])


def show_tensors(slots: Iterable[Slot], tensors: Mapping[int, Sequence[nn.Parameter]]) -> None:
    """Puts other tensors into the module: those of each buffer, by the buffer's id."""
    for module, attribute, buffer, number in slots:
        if id(buffer) in tensors:
            put(module, attribute, tensors[id(buffer)][number])


def paths_in(module: nn.Module) -> dict[int, str]:
    """Returns the qualified name of every module in `module`, by its id; that of `module` itself is ""."""
    return {id(child): path for path, child in module.named_modules()}


def flat_name_of(number: int) -> str:
    """Returns the name under which a module holds the flat parameter of one buffer."""
    return f"flat_param_{number}"


def put(module: nn.Module, attribute: str, param: nn.Parameter | None) -> None:
    """Sets `module.attribute`; None stands for one that is shown as a part of a flat tensor."""
    if type(module).__setattr__ is not nn.Module.__setattr__:
        # Modules such as nn.LSTM keep a second list of their weights, which their own __setattr__ maintains.
        setattr(module, attribute, param)
    else:
        module._parameters[attribute] = param
