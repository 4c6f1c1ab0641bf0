"""What `error_feedback=True` keeps on each rank, as an object of a snapshot."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from scale_core.flat.buffer import FlatBuffer
from scale_fsdp.runtime.unit import units_in


class ErrorFeedbackState:
    """What rounding has taken from gradients and the next step will add, of each rank, to be saved and loaded.

        objects = {"model": model, "optimizer": optimizer, "error_feedback": ErrorFeedbackState(model)}
        snapshot.save(folder, step, objects)

    With it a run goes on to the bit at the same number of ranks. At another number, or where units or the ranks of a
    node are others, errors begin at zero, with one warning: what each rank has not sent belongs to its own messages.
    Take it after the optimizer's step (and `ShardedGradScaler.update`).

    A snapshot grows by 4 bytes for each gradient that a rank quantizes, on every rank: all of the model's, or one part
    in `node_size`. Without it a run that goes on begins with an error of zero.

    Args:
        model: With units whose `CommunicationPolicy` has `error_feedback=True`.

    Raises:
        ValueError: It has none.
    """

    is_per_rank = True  # To `scale_core.snapshot.save`
    starts_over = True  # At another number of ranks

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        if not any(buffer.wire is not None and buffer.wire.error_feedback for buffer in _buffers(model)):
            raise ValueError(
                f"ErrorFeedbackState: no unit of this {type(model).__name__} has error_feedback=True: leave it out, or "
                "write fully_shard(module, communication=CommunicationPolicy(reduce='int4', error_feedback=True))"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the errors of this rank by the name of the first parameter of their buffer; they are not copied."""
        return {
            buffer.names[0]: {"of": _signature(buffer), "errors": [each.error for each in buffer.error_feedback]}
            for buffer in _buffers(self._model)
            if buffer.error_feedback
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` has returned; an error that belongs to other messages begins at zero."""
        anew = []
        for buffer in _buffers(self._model):
            saved = state.get(buffer.names[0], {})
            fits = saved.get("of") == _signature(buffer)
            if buffer.error_feedback and not fits:
                anew.append(buffer.names[0])
            for number, feedback in enumerate(buffer.error_feedback):
                error = saved["errors"][number] if fits else None
                feedback.load(None if error is None else error.to(buffer.compute_device))
        if anew:
            warnings.warn(
                f"the error feedback of the gradients of '{anew[0]}'"
                f"{f' and {len(anew) - 1} other buffers' if anew[1:] else ''} begins at zero: it was saved by other "
                "ranks, with other units or another node_size, and belongs to the messages of these",
                stacklevel=2,
            )


def _buffers(model: nn.Module) -> list[FlatBuffer]:
    return [buffer for unit in units_in(model) for buffer in unit.buffers]


def _signature(buffer: FlatBuffer) -> list[Any]:
    """What decides which elements stand where in this rank's messages."""
    groups, nodes = buffer.groups, buffer.groups.nodes
    sizes = [groups.shard.size, groups.replicas.size, 1 if nodes is None else nodes.intra_node.size]
    named = zip(buffer.names, buffer.layout.entries, strict=True)
    return [sizes, [[name, entry.offset, entry.numel] for name, entry in named]]
