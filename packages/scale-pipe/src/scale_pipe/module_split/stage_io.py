"""What one stage of a split model hands to the next: tensors, and how they are nested, apart from one another.

It holds the arguments of the call at which the model is cut, the model's own inputs, and the trail: what the modules
called so far have returned, as shapes, and what they have added to lists beside that (`collected_outputs`). A tensor
that stands in several places is handed over once.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from scale_core.tree import map_tensors
from scale_pipe.module_split.collected_outputs import Collected
from scale_pipe.module_split.placeholder_tensor import Absent, shape_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call: by position, and by keyword."""

_KINDS = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, Enum),
    *(Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(tuple, list, MutableMapping),
)


class Local(Enum):
    """Stands for an object that is not handed over: a cache of keys and values, a function. The next stage has its own.

    Attributes:
        VALUE: The one there is.
    """

    VALUE = 0


class Returned(NamedTuple):
    """What a module has returned.

    Attributes:
        name: Of the module.
        shapes: Its output, with tensors on the meta device.
    """

    name: str
    shapes: Any


class Layout:
    """How the tensors are nested. Tensors on the meta device stand for them: that of shape [i] for the i-th.

    Args:
        inputs: The model's arguments.
        call: The arguments of the call at which the model is cut.
        trail: What was returned so far, in order.
        collected: Of each call of the trail, what it has collected.
        absent: Shapes of inputs that are not handed over, numbered after the tensors that are.
    """

    def __init__(
        self,
        inputs: Arguments,
        call: Arguments,
        trail: tuple[Returned, ...],
        collected: Sequence[Collected],
        absent: list[Tensor],
    ) -> None:
        self.inputs, self.call, self.trail, self.collected, self.absent = inputs, call, trail, collected, absent


@dataclass(frozen=True)
class Handed:
    """The output of a stage, and the input of the next.

    Attributes:
        tensors: Any shapes; each once.
        layout: Everything else.
    """

    tensors: tuple[Tensor, ...]
    layout: Layout


class Opened(NamedTuple):
    """What was handed over, in its places.

    Attributes:
        inputs: The model's arguments; a `Local` where an object could not be handed over.
        call: The arguments of the call at which the model is cut.
        trail: What was returned so far.
        collected: Of each call of the trail, what it has collected.
    """

    inputs: Arguments
    call: Arguments
    trail: tuple[Returned, ...]
    collected: Sequence[Collected]


def hand_over(
    inputs: Arguments, call: Arguments, trail: tuple[Returned, ...], collected: Sequence[Collected] = ()
) -> Handed:
    """Returns what the next stage needs.

    Args:
        inputs: The model's arguments; those that are absent tensors stay absent.
        call: The arguments of the call at which the model is cut.
        trail: What was returned so far.
        collected: Of each call of the trail, what it has collected; nothing where none has.
    """
    tensors: dict[int, Tensor] = {}
    lacking: dict[int, Tensor] = {}

    def take(tensor: Tensor) -> Tensor:
        into = lacking if isinstance(tensor, Absent) else tensors
        into[id(tensor)] = tensor
        return tensor

    whole = (inputs, call, list(collected) if any(collected) else [])
    map_tensors(take, whole)
    places = {key: place for place, key in enumerate([*tensors, *lacking])}
    inputs, call, collected = map_tensors(lambda tensor: _place(places[id(tensor)]), whole)
    absent = [*map(shape_of, lacking.values())]
    layout = Layout(_without_locals(inputs), _without_locals(call), trail, collected, absent)
    return Handed(tuple(tensors.values()), layout)


def open_handed(handed: Handed, device: torch.device) -> Opened:
    """Puts the tensors into their places.

    Args:
        handed: What the stage before has returned.
        device: Of the stage; that of what is absent.
    """
    layout = handed.layout
    missing = [Absent(shape, "an input of the model that is not passed on", device) for shape in layout.absent]
    found = [*handed.tensors, *missing]
    whole = (layout.inputs, layout.call, layout.collected)
    inputs, call, collected = map_tensors(lambda place: found[place.numel()], whole)
    return Opened(inputs, call, layout.trail, collected or [{}] * len(layout.trail))


@lru_cache(maxsize=1024)
def _place(number: int) -> Tensor:
    with torch.inference_mode(mode=False):  # It outlives the caller's mode.
        return torch.empty(number, device="meta")


def _without_locals(tree: Arguments) -> Arguments:
    replaced: Arguments = pytree.tree_map(lambda leaf: leaf if _is_handed(leaf) else Local.VALUE, tree)
    return replaced


def _is_handed(leaf: Any) -> bool:
    return isinstance(leaf, _KINDS) or (is_dataclass(leaf) and not isinstance(leaf, type))
