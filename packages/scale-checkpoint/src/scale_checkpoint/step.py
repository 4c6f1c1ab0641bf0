"""One step of a model, forward and backward, that leaves no trace: for those who measure."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from scale_checkpoint.tracing import tensors_in


class Step:
    """Forward and backward of a model on one batch.

    Args:
        model: Any module.
        sample_input: See `plan_memory`.
        loss: See `plan_memory`.
    """

    def __init__(self, model: nn.Module, sample_input: Any, loss: Callable[[Any], Tensor] | None) -> None:
        self.model = model
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(sample_input, Mapping):
            self.kwargs = {**sample_input}
        else:
            self.args = tuple(sample_input) if isinstance(sample_input, (tuple, list)) else (sample_input,)
        self._loss = loss or _default_loss

    def run(self) -> None:
        """Runs the step; gradients begin anew."""
        for parameter in self.model.parameters():
            parameter.grad = None
        loss = self._loss(self.model(*self.args, **self.kwargs))
        if not loss.requires_grad:
            raise ValueError(
                f"a step needs a gradient, but no parameter of {type(self.model).__name__} takes part in the loss; "
                "call model.requires_grad_() and pass `loss`"
            )
        loss.backward()


def _default_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor) and output.numel() == 1:
        loss = output
    if isinstance(loss, Tensor):
        return loss
    return scalar_of([tensor for tensor in tensors_in(output) if tensor.requires_grad])


def scalar_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a scalar whose backward hands each of the tensors a gradient of ones, and that holds none of them.

    Args:
        tensors: At least one of which asks for a gradient.
    """
    scalar: Tensor = _Behind.apply(*tensors)  # type: ignore[no-untyped-call]
    return scalar


class _Behind(torch.autograd.Function):
    """A scalar of any tensors; its backward makes a gradient of ones for each that asks for one."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.like = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.ones(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.like, ctx.needs_input_grad, strict=True)
        )


@contextmanager
def undisturbed(module: nn.Module) -> Iterator[None]:
    """Inside, gradients begin anew; afterwards they, buffers and random numbers are what they were.

    Args:
        module: Whose parameters and buffers.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    devices = list({tensor.device for tensor in module.parameters() if tensor.device.type != "cpu"})
    try:
        with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
            yield
    finally:
        with torch.no_grad():
            for parameter, gradient in gradients:
                parameter.grad = gradient
            for buffer, value in buffers:
                buffer.copy_(value)


def device_of(model: nn.Module) -> torch.device:
    """Returns the device whose memory counts: that of the first parameter.

    Args:
        model: Any module.
    """
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def now(device: torch.device) -> float:
    """Returns a time in seconds: that of all threads on the CPU, which no neighbour disturbs; the clock's elsewhere."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()
