"""Stage outputs: the message of one stage of a split model to the next, as tensors and a layout of their nesting.

They hold the arguments of the call at which the model is cut, the model's own inputs, and the trail: the output shapes
of the modules called so far, with the outputs that these have collected (`collected_outputs`). A tensor in several
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
    """Stands for an object that is not sent, for example a cache of keys and values: each stage has its own."""

    VALUE = 0


class ModuleOutputShapes(NamedTuple):
    """The output of a module's call without values: in `output`, the tensor of shape [i] stands for the i-th.

    Equal shapes are one object (`to_meta`), so they cannot stand in the output themselves.
    """

    name: str
    output: Any
    shapes: list[Tensor]  # On the meta device, one for each tensor.


class StageInput(NamedTuple):
    """The received values of a stage, or their layout; see `StageOutputLayout`."""

    inputs: CallArguments  # Of the model; a `NotForwarded` where an object was not sent.
    call: CallArguments  # Of the call at which the model is cut.
    trail: tuple[ModuleOutputShapes, ...]  # Of the modules called so far.
    collected: Sequence[Collected]  # Of each call of the trail.


class StageOutputLayout:
    """How the tensors are nested: in `content`, the tensor of shape [i] on the meta device stands for the i-th.

    `absent` has the shapes of inputs that are not sent, by number; the others are sent in order.
    """

    def __init__(self, content: StageInput, absent: dict[int, Tensor]) -> None:
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
    """Returns the inputs of the next stage; inputs that are placeholders stay such."""
    content = (inputs, call, list(collected) if any(collected) else [])
    (inputs, call, collected), tensors = _take_tensors(content)
    layout = StageInput(_without_unsendable(inputs), _without_unsendable(call), trail, collected)
    absent = {number: to_meta(t) for number, t in enumerate(tensors) if isinstance(t, PlaceholderTensor)}
    sent = tuple(tensor for number, tensor in enumerate(tensors) if number not in absent)
    return StageOutput(sent, StageOutputLayout(layout, absent))


def unpack_stage_input(output: StageOutput, device: torch.device) -> StageInput:
    """Puts the tensors into their places; placeholders are on the stage's device."""
    absent, content = output.layout.absent, output.layout.content
    sent = iter(output.tensors)
    tensors = [
        PlaceholderTensor(absent[number], "an input of the model that is not passed on", device)
        if number in absent
        else next(sent)
        for number in range(len(absent) + len(output.tensors))
    ]
    inputs, call, collected = _put_tensors(tensors, (content.inputs, content.call, content.collected))
    return StageInput(inputs, call, content.trail, collected or [{}] * len(content.trail))


def pack_module_output(name: str, output: Any) -> ModuleOutputShapes:
    """Returns the placeholder of a module's output for later stages."""
    numbered, tensors = _take_tensors(output)
    return ModuleOutputShapes(name, numbered, [to_meta(tensor) for tensor in tensors])


def unpack_module_output(packed: ModuleOutputShapes, stages: str, device: torch.device) -> Any:
    """Returns the output with a placeholder for each tensor, on the device of the stage that has none."""
    origin = f"module {packed.name!r} of {stages}"
    return _put_tensors([PlaceholderTensor(shape, origin, device) for shape in packed.shapes], packed.output)


def _take_tensors(tree: Any) -> tuple[Any, list[Tensor]]:
    """Returns a tree with the tensor of shape [i] in place of the i-th, and the tensors, each once."""
    tensors: list[Tensor] = []

    def take(tensor: Tensor) -> Tensor:
        tensors.append(tensor)
        return _numbered(len(tensors) - 1)

    return map_tensors(take, tree), tensors


def _put_tensors(tensors: Sequence[Tensor], tree: Any) -> Any:
    """Reverts `_take_tensors`."""
    return map_tensors(lambda number: tensors[number.numel()], tree)


@lru_cache(maxsize=1024)
def _numbered(number: int) -> Tensor:
    with torch.inference_mode(mode=False):  # It outlives the caller's mode.
        return torch.empty(number, device="meta")


def _without_unsendable(tree: CallArguments) -> CallArguments:
    replaced: CallArguments = pytree.tree_map(lambda leaf: leaf if _is_sendable(leaf) else NotForwarded.VALUE, tree)
    return replaced


def _is_sendable(leaf: Any) -> bool:
    return isinstance(leaf, _SENDABLE) or (is_dataclass(leaf) and not isinstance(leaf, type))
