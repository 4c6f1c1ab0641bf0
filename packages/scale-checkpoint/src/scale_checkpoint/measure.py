"""What a step takes, measured: to set beside what a plan predicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from scale_checkpoint.live import LiveBytes, storage_bytes
from scale_checkpoint.nested import tensors_in
from scale_checkpoint.step import Step, device_of, least_seconds, steady, undisturbed


@dataclass(frozen=True)
class MeasuredStep:
    """Forward and backward of a model as it is.

    Attributes:
        peak_bytes: The most that lives at any one time: parameters, buffers, inputs and gradients included.
        seconds: The least of the repeats: CPU time with one thread where the model is on the CPU, and until all is done
            otherwise.
    """

    peak_bytes: int
    seconds: float


def measure_step(
    model: nn.Module, sample_input: Any, *, loss: Callable[[Any], Tensor] | None = None, repeats: int = 5
) -> MeasuredStep:
    """Runs steps of a model as it is treated now; gradients, buffers and random numbers are afterwards what they were.

    Args:
        model: Any module.
        sample_input: See `plan_memory`.
        loss: See `plan_memory`.
        repeats: How often the time is taken at least; before that, the memory is. 0 takes no time.

    Raises:
        ValueError: The step has no gradient.
    """
    device = device_of(model)
    step = Step(model, sample_input, loss)
    standing_bytes = storage_bytes([*model.parameters(), *model.buffers(), *tensors_in((step.args, step.kwargs))])
    with undisturbed(model), steady(device):
        live = LiveBytes(device)
        with live:
            step.run()
        live.close()
        seconds = least_seconds({"step": lambda: step.seconds(device)}, repeats)["step"]
    return MeasuredStep(standing_bytes + live.peak_bytes, seconds)
