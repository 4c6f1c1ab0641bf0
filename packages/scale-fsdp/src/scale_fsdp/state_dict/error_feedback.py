"""The rounding errors that `error_feedback=True` keeps on each rank, as an object of a snapshot."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from scale_core.flat.buffer import FlatBuffer
from scale_fsdp.runtime.unit import units_in
from scale_fsdp.state_dict.naming import module_names
from scale_fsdp.transports.policy import wire_formats


class ErrorFeedbackState:
    """The rounding errors of each rank's gradients, which the next step adds, to be saved and loaded.

        objects = {"model": model, "optimizer": optimizer, "error_feedback": ErrorFeedbackState(model)}
        scale_snapshot.save(folder, step, objects)

    With it a run goes on to the bit at the same number of ranks. If the number of ranks, the units or the ranks of a
    node differ, errors start at zero with one warning, because an error belongs to its rank's messages. Take it after
    the optimizer's step (and `ShardedGradScaler.update`).

    A snapshot grows by 4 bytes for each gradient that a rank quantizes, on every rank: all of the model's, or one part
    in `node_size`. Without it a run that goes on begins with an error of zero.

    Args:
        model: With units whose `CommunicationPolicy` has `error_feedback=True`.

    Raises:
        ValueError: It has none.

    Examples:
        >>> import torch
        >>> from scale_fsdp import CommunicationPolicy, ShardOptions, fully_shard
        >>> from scale_fsdp.state_dict.error_feedback import ErrorFeedbackState
        >>> policy = CommunicationPolicy(reduce="int4", error_feedback=True)
        >>> model = fully_shard(torch.nn.Linear(64, 64), options=ShardOptions(communication=policy))
        >>> objects = {"model": model, "errors": ErrorFeedbackState(model)}  # of scale_snapshot.save

    See also: [the guide to state dicts](../guides/saving.md).
    """

    is_per_rank = True  # To `scale_snapshot.save`
    starts_over = True  # At another number of ranks

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        wires = [wire_formats(buffer) for unit in units_in(model) for buffer in unit.buffers]
        if not any(wire is not None and wire.error_feedback for wire in wires):
            raise ValueError(
                f"ErrorFeedbackState: no unit of this {type(model).__name__} has error_feedback=True: leave it out, or "
                "write fully_shard(module, options=ShardOptions(communication=CommunicationPolicy(reduce='int4', "
                "error_feedback=True)))"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the errors of this rank by the unit and the number of their buffer in it; they are not copied."""
        return {
            named_buffer.key: {
                "of": named_buffer.signature,
                "errors": [feedback.error for feedback in named_buffer.buffer.error_feedback],
            }
            for named_buffer in _named_buffers(self._model)
            if named_buffer.buffer.error_feedback
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over a result of `state_dict`; an error that belongs to other messages begins at zero."""
        anew = []
        for named_buffer in _named_buffers(self._model):
            saved = state.get(named_buffer.key, {})
            fits = saved.get("of") == named_buffer.signature
            if named_buffer.buffer.error_feedback and not fits:
                anew.append(named_buffer.names[0])
            for number, feedback in enumerate(named_buffer.buffer.error_feedback):
                error = saved["errors"][number] if fits else None
                feedback.load(None if error is None else error.to(named_buffer.buffer.compute_device))
        if anew:
            warnings.warn(
                f"the error feedback of the gradients of '{anew[0]}'"
                f"{f' and {len(anew) - 1} other buffers' if anew[1:] else ''} begins at zero: it was saved by other "
                "ranks, with other units or another node_size, and belongs to the messages of these",
                stacklevel=2,
            )


class _Named(NamedTuple):
    """A buffer, by names in the model that was given: units that none contains are each named from themselves."""

    key: str  # of the unit's module, and the buffer's number in it
    buffer: FlatBuffer
    names: list[str]  # of its parameters

    @property
    def signature(self) -> list[Any]:
        """The settings that decide the place of each element in this rank's messages."""
        groups, nodes = self.buffer.groups, self.buffer.groups.nodes
        sizes = [groups.shard.size, groups.replicas.size, 1 if nodes is None else nodes.intra_node.size]
        named = zip(self.names, self.buffer.layout.entries, strict=True)
        return [sizes, [[name, entry.offset, entry.numel] for name, entry in named]]


def _named_buffers(model: nn.Module) -> list[_Named]:
    paths = module_names(model)
    named = []
    for unit in units_in(model):
        (path, *_) = (paths[id(module)] for module in unit.modules if id(module) in paths)
        names: dict[tuple[int, int], str] = {}
        for slot in unit.slots:  # A tied parameter has its first name.
            name = f"{paths.get(id(slot.module), '')}.{slot.attribute}".lstrip(".")
            names.setdefault((id(slot.buffer), slot.number), name)
        for number, buffer in enumerate(unit.buffers):
            param_names = [names[id(buffer), index] for index in range(len(buffer.names))]
            named.append(_Named(f"{path}.{number}".lstrip("."), buffer, param_names))
    return named
