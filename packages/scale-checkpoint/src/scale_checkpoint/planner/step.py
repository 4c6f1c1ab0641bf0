"""One step of a model, forward and backward, for measurements; afterwards the model is as before."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from scale_checkpoint.live_memory import LiveMemory, storage_bytes
from scale_checkpoint.tree import unique_tensors
from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import exchange_text
from scale_core.comm.group import Group

ALONE = Group()

SHORT_SECONDS = 0.05
"""What is done sooner is measured more often."""


class Step:
    """Forward and backward of a model on one batch."""

    def __init__(
        self, model: nn.Module, sample_input: Any, loss: Callable[[Any], Tensor] | None, group: Group = ALONE
    ) -> None:
        _check_initialized(model)
        self.group = group  # ranks that run the same steps at the same time
        self.model, self.device = model, device_of(model)
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        if isinstance(sample_input, Mapping):
            self.kwargs = {**sample_input}
        else:
            self.args = tuple(sample_input) if isinstance(sample_input, (tuple, list)) else (sample_input,)
        self._loss = loss or _default_loss

    def bytes_before(self) -> int:
        """Returns the bytes that live before the step: parameters, buffers and inputs."""
        inputs = unique_tensors((self.args, self.kwargs))
        return storage_bytes([*self.model.parameters(), *self.model.buffers(), *inputs])

    def seconds(self) -> float:
        start = time_now(self.device)
        self.run()
        return self.largest(time_now(self.device) - start)

    def any_(self, flag: bool) -> bool:
        """Whether it is true on any of the ranks."""
        return bool(largest_over_ranks(flag, self.group))

    def largest(self, value: float) -> float:
        """Returns the largest of all ranks: numbers of repetitions have to be the same on these."""
        return float(largest_over_ranks(value, self.group))

    def run(self) -> None:
        """Runs the step; gradients begin again."""
        self.clear_grads()
        loss = self._loss(self.model(*self.args, **self.kwargs))
        if not loss.requires_grad:
            raise ValueError(
                f"a step needs a gradient, but no parameter of {type(self.model).__name__} takes part in the loss; "
                "call model.requires_grad_() and pass `loss`"
            )
        loss.backward()

    def clear_grads(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


def largest_over_ranks(value: Any, group: Group) -> Any:
    """Returns numbers, in lists and dicts of one structure, each the largest of all ranks; all call it together."""
    if group.size == 1:
        return value
    return _largest([json.loads(text) for text in exchange_text(json.dumps(value), group)])


def _largest(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _largest([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [_largest(samples) for samples in zip(*values, strict=True)]
    return max(values) if isinstance(first, int | float) else first


def _check_initialized(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(
                f"'{name}' of a lazy module has no shape before the first forward, so nothing can be measured yet: "
                "call model(...) once on a batch, before anything else"
            )


def _default_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if loss is None and isinstance(output, Tensor) and output.numel() == 1:
        loss = output
    if isinstance(loss, Tensor):
        return loss
    return unit_grad_scalar([tensor for tensor in unique_tensors(output) if tensor.requires_grad])


def unit_grad_scalar(tensors: Sequence[Tensor]) -> Tensor:
    """Returns a scalar whose backward hands each of the tensors a gradient of ones, and that holds none of them."""
    scalar: Tensor = _UnitGradScalar.apply(*tensors)  # type: ignore[no-untyped-call]
    return scalar


class _UnitGradScalar(torch.autograd.Function):
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
def preserve_state(module: nn.Module) -> Iterator[None]:
    """Inside, gradients begin at None; afterwards gradients, buffers and random number generators are as before."""
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    buffers = [
        (part, name, buffer, buffer.detach().clone())
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
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
            for part, name, buffer, value in buffers:
                buffer.copy_(value)
                now = part._buffers.get(name)
                # One of another shape is a table that has grown, which the module relies on.
                if now is not None and now.shape == buffer.shape:
                    part._buffers[name] = buffer


def device_of(model: nn.Module) -> torch.device:
    """Returns the device whose memory counts: the device of the first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def time_now(device: torch.device) -> float:
    """Returns seconds: CPU time of the process on the CPU, which other work does not disturb; wall time elsewhere."""
    if device.type == "cpu":
        return time.process_time()
    torch.accelerator.synchronize(device)
    return time.perf_counter()


@contextmanager
def single_threaded(device: torch.device) -> Iterator[None]:
    """Inside, the CPU computes with one thread, so that times can be compared.

    Threads that wait for one another spin, and take CPU time: where the machine is busy, more than the work.
    """
    if device.type != "cpu":
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def least_seconds(runs: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Takes each time several times, by turns, so that a disturbance of the machine affects all; returns the least.

    Short ones, which are disturbed most, are taken until `SHORT_SECONDS` are spent on all of them.
    """
    least = dict.fromkeys(runs, float("inf") if repeats else 0.0)
    spent, turns = 0.0, 0
    while repeats and (turns < repeats or (spent < SHORT_SECONDS and turns < 20 * repeats)):
        for name, run in runs.items():
            seconds = run()
            least[name] = min(least[name], seconds)
            spent += seconds
        turns += 1
    return least


@dataclass(frozen=True)
class MeasuredStep:
    """Forward and backward of an unchanged model.

        >>> import torch
        >>> from scale_checkpoint.planner.step import measure_step
        >>> measured = measure_step(torch.nn.Linear(64, 64), torch.randn(128, 64), repeats=1)
        >>> measured.peak_bytes > 4 * 64 * 64
        True

    Attributes:
        peak_bytes: The most that lives at any one time: parameters, buffers, inputs and gradients included.
        seconds: The least of the repeats: CPU time with one thread where the model is on the CPU, and until all is done
            otherwise.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """

    peak_bytes: int
    seconds: float


@checked_arguments
def measure_step(
    model: nn.Module, sample_input: Any, *, loss: Callable[[Any], Tensor] | None = None, repeats: int = 5
) -> MeasuredStep:
    """Runs steps of a model with its present wrappers; gradients, buffers and random numbers are unchanged afterwards.

    Args:
        model: Any module.
        sample_input: See `plan_memory`.
        loss: See `plan_memory`.
        repeats: How often the time is taken at least; before that, the memory is. 0 takes no time.

    Raises:
        ValueError: The step has no gradient.

    Examples:
        >>> import torch
        >>> from scale_checkpoint.planner.step import measure_step
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
        >>> step = measure_step(model, torch.randn(128, 64), repeats=1)
        >>> step.peak_bytes > 4 * 128 * 256, step.seconds > 0
        (True, True)

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    step = Step(model, sample_input, loss)
    model_bytes = step.bytes_before()
    with preserve_state(model), single_threaded(step.device):
        live = LiveMemory(step.device)
        with live:
            step.run()
        live.close()
        seconds = least_seconds({"step": step.seconds}, repeats)["step"]
    return MeasuredStep(model_bytes + live.peak_bytes, seconds)
