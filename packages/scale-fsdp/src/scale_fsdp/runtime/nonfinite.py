"""Finds the first NaN or infinity in outputs of units and in local gradients (`error_if_nonfinite=True`).

Once gradients are averaged, an infinity or a NaN of one rank is everybody's, and nobody can say where it came from. So
each rank looks at its own results: the outputs of units and, parameter by parameter, gradients before they
are reduced. That is one reduction per tensor, while the computation goes on; the host reads the results once per pass,
since it then waits until the device has come that far.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core import compat
from scale_core.consistency.execution_order import unit_title
from scale_core.tree import tensors_in
from scale_fsdp.runtime.unit import Unit


class _MinMax(NamedTuple):
    """The least and the largest value in a tensor, scalars, NaN where it holds one.

    One operator that looks for both has vector instructions on a processor; one that looks for values that are not
    finite, or for the largest magnitude, has none, and takes over ten times as long.
    """

    unit: Unit
    param: str  # whose gradient it is; "" for an output
    least: Tensor
    largest: Tensor


class NonFiniteSearch:
    """The results of one rank, `rank`, in the current pass."""

    def __init__(self, rank: int) -> None:
        self.fault: FloatingPointError | None = None  # the first that was found, until `reset`
        self._rank = rank
        self._seen: list[_MinMax] = []

    def add_output(self, unit: Unit, output: Any) -> None:
        """Looks at the tensors that a unit's forward has returned."""
        for tensor in tensors_in(output):
            self._add(unit, "", tensor)

    def add_gradient(self, unit: Unit, number: int, index: int) -> None:
        """Looks at the local gradient of one parameter of a unit's buffer."""
        buffer = unit.buffers[number]
        grad = buffer.unsharded_params[index].grad
        if grad is not None:
            self._add(unit, buffer.names[index], grad if grad.layout is torch.strided else grad._values())

    def find(self) -> FloatingPointError | None:
        """Waits for the results; returns the first fault since `reset`, with rank, unit and parameter."""
        seen, self._seen = self._seen, []
        if seen and self.fault is None:
            device = seen[0].least.device
            ends = [end.to(device, torch.float64) for entry in seen for end in entry[2:]]
            values = compat.values_of(torch.stack(ends), simulated=[0.0] * len(ends))
            pairs = zip(values[::2], values[1::2], strict=True)
            wrong = [
                entry
                for entry, (least, largest) in zip(seen, pairs, strict=True)
                if not (math.isfinite(least) and math.isfinite(largest))
            ]
            if wrong:
                self.fault = FloatingPointError(self._message(wrong[0]))
        return self.fault

    def reset(self) -> None:
        """The pass has ended or was aborted."""
        self.fault, self._seen = None, []

    def _add(self, unit: Unit, param: str, tensor: Tensor) -> None:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            self._seen.append(_MinMax(unit, param, *torch.aminmax(real)))

    def _message(self, found: _MinMax) -> str:
        title = unit_title(found.unit.name)
        subject = (
            f"the local gradient of '{found.param}', a parameter of {title},"
            if found.param
            else (f"an output of {title}")
        )
        # NaN in the weights has another cause than a bad batch; of the weights this rank has only its own shards.
        poisoned = [
            buffer.names[index]
            for buffer in found.unit.buffers
            for index, piece in enumerate(buffer.pieces)
            if not bool(piece.isfinite().all())
        ]
        why = (
            f"; '{poisoned[0]}' itself is not finite on this rank, so an earlier step or a checkpoint has brought it: "
            "load the last snapshot without one, which latest_snapshot(folder, finite=True) finds"
            if poisoned
            else ": skip the batch, or lower the learning rate or clip where it comes again"
        )
        return (
            f"{subject} is not finite on rank {self._rank}, and the first that was not in this pass{why}. Under a "
            "gradient scaler, or where infinities are meant, leave error_if_nonfinite out"
        )
