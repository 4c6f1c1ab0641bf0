"""Stage outputs: what one stage of a split model sends to the next, as tensors and a layout of how they are nested.

They hold the arguments of the call at which the model is cut, the model's own inputs, and the trail: the output shapes
of the modules called so far, with what these have collected (`collected_outputs`). A tensor in several
places is sent once.
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
from scale_pipe.module_split.placeholder_tensor import PlaceholderTensor, to_meta

CallArguments = tuple[tuple[Any, ...], dict[str, Any]]
"""By position, and by keyword."""

_SENDABLE = (
    *(type(None), bool, int, float, complex, str, bytes, slice, range, Enum),
    *(Tensor, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
    *(tuple, list, MutableMapping),
)


class NotForwarded(Enum):
    """Stands for an object that is not sent, such as a cache of keys and values: each stage has its own."""

    VALUE = 0


class ModuleOutputShapes(NamedTuple):
    """The output of a module's call, with tensors on the meta device."""

    name: str
    shapes: Any


class StageInput(NamedTuple):
    """What a stage has received, or its layout; see `StageOutputLayout`."""

    inputs: CallArguments  # Of the model; a `NotForwarded` where an object was not sent.
    call: CallArguments  # Of the call at which the model is cut.
    trail: tuple[ModuleOutputShapes, ...]  # Of the modules called so far.
    collected: Sequence[Collected]  # Of each call of the trail.


class StageOutputLayout:
    """How the tensors are nested: in `content`, the tensor of shape [i] on the meta device stands for the i-th.

    `absent` has the shapes of inputs that are not sent, numbered after the tensors that are.
    """

    def __init__(self, content: StageInput, absent: list[Tensor]) -> None:
        self.content, self.absent = content, absent


@dataclass(frozen=True)
class StageOutput:
    """The output of a stage, and the input of the next."""

    tensors: tuple[Tensor, ...]  # Of any shapes, each once.
    layout: StageOutputLayout


def pack_stage_output(
    inputs: CallArguments,
    call: CallArguments,
    trail: tuple[ModuleOutputShapes, ...],
    collected: Sequence[Collected] = (),
) -> StageOutput:
    """Returns what the next stage needs; inputs that are placeholders stay such."""
    sent: dict[int, Tensor] = {}
    absent: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        into = absent if isinstance(tensor, PlaceholderTensor) else sent
        into[id(tensor)] = tensor
        return tensor

    content = (inputs, call, list(collected) if any(collected) else [])
    map_tensors(note, content)
    numbers = {key: number for number, key in enumerate([*sent, *absent])}
    inputs, call, collected = map_tensors(lambda tensor: _numbered(numbers[id(tensor)]), content)
    layout = StageInput(_without_unsendable(inputs), _without_unsendable(call), trail, collected)
    return StageOutput(tuple(sent.values()), StageOutputLayout(layout, [to_meta(tensor) for tensor in absent.values()]))


def unpack_stage_input(output: StageOutput, device: torch.device) -> StageInput:
    """Puts the tensors into their places; placeholders are on the stage's device."""
    absent, content = output.layout.absent, output.layout.content
    missing = [PlaceholderTensor(shape, "an input of the model that is not passed on", device) for shape in absent]
    tensors = [*output.tensors, *missing]
    nested = (content.inputs, content.call, content.collected)
    inputs, call, collected = map_tensors(lambda number: tensors[number.numel()], nested)
    return StageInput(inputs, call, content.trail, collected or [{}] * len(content.trail))


@lru_cache(maxsize=1024)
def _numbered(number: int) -> Tensor:
    with torch.inference_mode(mode=False):  # It outlives the caller's mode.
        return torch.empty(number, device="meta")


def _without_unsendable(tree: CallArguments) -> CallArguments:
    replaced: CallArguments = pytree.tree_map(lambda leaf: leaf if _is_sendable(leaf) else NotForwarded.VALUE, tree)
    return replaced


def _is_sendable(leaf: Any) -> bool:
    return isinstance(leaf, _SENDABLE) or (is_dataclass(leaf) and not isinstance(leaf, type))
