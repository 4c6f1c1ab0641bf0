"""Who was the first to compute what is not finite: for the root that asks for it by `error_if_nonfinite=True`.

Once gradients are averaged, an infinity or a NaN of one rank is everybody's, and nobody can say where it came from. So
each rank looks at what it computes by itself: the outputs of units and, parameter by parameter, gradients before they
are reduced. The look is one reduction per tensor, beside the computation; the host asks for the results once per pass,
since asking makes it wait until the device has come that far.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core import compat
from scale_core.consistency.execution_order import unit_title
from scale_core.tree import tensors_in
from scale_fsdp.unit import Unit


class _Sighting(NamedTuple):
    """The least and the largest value in a tensor, scalars, NaN where it holds one; and where they were seen.

    An operator that looks for both has vector instructions on a processor; one that looks for what is not finite, or
    for the largest magnitude, has none, and takes over ten times as long.
    """

    unit: Unit
    param: str
    least: Tensor
    largest: Tensor


class NonFiniteSearch:
    """What one rank has computed in the pass that runs now.

    Args:
        rank: This rank.

    Attributes:
        fault: What was found first, and not raised yet.
    """

    def __init__(self, rank: int) -> None:
        self.fault: FloatingPointError | None = None
        self._rank = rank
        self._sightings: list[_Sighting] = []

    def note_output(self, unit: Unit, output: Any) -> None:
        """A unit's forward has given this: tensors anywhere in it."""
        for tensor in tensors_in(output):
            self._look(unit, "", tensor)

    def note_gradient(self, unit: Unit, number: int, index: int) -> None:
        """The gradient of a parameter of a unit's buffer has come."""
        buffer = unit.buffers[number]
        grad = buffer.wholes[index].grad
        if grad is not None:
            self._look(unit, buffer.names[index], grad if grad.layout is torch.strided else grad._values())

    def ask(self) -> FloatingPointError | None:
        """Waits for what was looked at since the last call; returns the first fault that was found and not forgotten.

        Returns:
            An error that names rank, unit and, of a gradient, the parameter.
        """
        sightings, self._sightings = self._sightings, []
        if sightings and self.fault is None:
            by_device: dict[torch.device, list[int]] = {}
            for number, sighting in enumerate(sightings):
                by_device.setdefault(sighting.least.device, []).append(number)
            wrong: list[int] = []
            for numbers in by_device.values():
                ends = [end.double() for number in numbers for end in sightings[number][2:]]
                values = compat.values_of(torch.stack(ends), simulated=[0.0] * len(ends))
                pairs = zip(values[::2], values[1::2], strict=True)
                finite = [math.isfinite(least) and math.isfinite(largest) for least, largest in pairs]
                wrong += [number for number, is_finite in zip(numbers, finite, strict=True) if not is_finite]
            if wrong:
                self.fault = FloatingPointError(self._in_words(sightings[min(wrong)]))
        return self.fault

    def forget(self) -> None:
        """The pass is over, or was given up."""
        self.fault, self._sightings = None, []

    def _look(self, unit: Unit, param: str, tensor: Tensor) -> None:
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
            self._sightings.append(_Sighting(unit, param, *torch.aminmax(real)))

    def _in_words(self, seen: _Sighting) -> str:
        title = unit_title(seen.unit.name)
        what = f"an output of {title}"
        if seen.param:
            what = f"the local gradient of '{seen.param}', a parameter of {title},"
        # Poisoned weights are another story than a bad batch; of those this rank has only its own parts.
        poisoned = [
            buffer.names[index]
            for buffer in seen.unit.buffers
            for index, piece in enumerate(buffer.pieces)
            if not bool(piece.isfinite().all())
        ]
        why = (
            f"; '{poisoned[0]}' itself is not finite on this rank, so an earlier step or a checkpoint has brought it: "
            "load the last good snapshot"
            if poisoned
            else ": skip the batch, or lower the learning rate or clip where it comes again"
        )
        return (
            f"{what} is not finite on rank {self._rank}, and the first that was not in this pass{why}. Under a "
            "gradient scaler, or where infinities are meant, leave error_if_nonfinite out"
        )
