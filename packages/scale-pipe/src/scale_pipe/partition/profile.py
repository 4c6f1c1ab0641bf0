"""Times and memory of layers and stages, measured on the machine that will run them, without lasting effects."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from scale_checkpoint.live_memory import LiveMemory, storage_bytes
from scale_checkpoint.planner.step import preserve_state, single_threaded
from scale_core import compat
from scale_core.arguments import checked_arguments
from scale_core.tree import map_tensors, tensors_in
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.skip.namespace import SkipKey, popped_keys
from scale_pipe.skip.tracker import run_with_skips
from scale_pipe.split_backward import SplitBackward

T = TypeVar("T")


class StageTimes(NamedTuple):
    """Seconds of wall clock of one micro-batch, waiting included.

    They are the least of several runs, because other programs disturb the fastest run least. On the CPU one thread
    runs, because threads that wait for each other are disturbed most.
    """

    forward: float
    input_gradient: float  # Next to nothing in the first stage.
    weight_gradient: float


class LayerBytes(NamedTuple):
    """Bytes of a layer: its parameters, and the tensors it keeps of a micro-batch for its backward, with its output."""

    activations: int
    parameters: int


class _Inputs(NamedTuple):
    """The inputs of a layer or stage: its arguments, and the skips that it and later ones pop."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    skips: Mapping[SkipKey, Any]


@checked_arguments(own="stages")
def profile_stages(
    stages: Sequence[nn.Module], *args: Any, seconds: float = 1.0, link: float | Sequence[float] = 0.0, **kwargs: Any
) -> Costs:
    """Measures the stages of a model, as `solve` and `simulate` take it.

    Each stage runs by itself on the output of the one before, in its mode. The fastest run of each counts, by the wall
    clock, on the CPU with one thread. Gradients, buffers and random states are afterwards as before.

        >>> import torch
        >>> from scale_pipe import profile_stages, solve, split
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> costs = profile_stages(split(model, ["1", "2", "3"]), torch.randn(4, 8), seconds=0.01)
        >>> solve(costs, num_ranks=2, num_micro_batches=4, visits=1000).schedule.num_stages
        4

    Args:
        stages: The result of `split`, or any modules that run in this order.
        args: One micro-batch, as the first stage takes it.
        seconds: Wall clock to spend on all stages, after each has run twice.
        link: Seconds of a transfer, of all links or by link.
        kwargs: For the first stage, by keyword.

    Raises:
        TypeError: The stages are one module, and no list.
        ValueError: There is no stage, or the number of links is not one less than the number of stages.
        Exception: An error of a stage, with a note on which one.

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    given_stages: object = stages
    if not isinstance(given_stages, Iterable):
        raise TypeError(
            f"stages are a list of modules, but got one {type(given_stages).__name__}: write [module], or what "
            "split(module, [...]) returns"
        )
    if not stages:
        raise ValueError("there are no stages to be measured; give the list that split(model, [...]) returns")
    inputs, times = _Inputs(args, kwargs, {}), []
    for number, stage in enumerate(stages):
        device = _device_of(stage, (inputs.args, dict(inputs.kwargs)))
        with _noting_errors(f"stage {number}", stage), preserve_state(stage):
            stage_times, inputs = _measure_times(stage, inputs, device, seconds / len(stages))
        times.append(stage_times)
    forward, input_gradient, weight_gradient = zip(*times, strict=True)
    return Costs.measured(forward, input_gradient, weight_gradient, link)


def layer_times(
    module: nn.Sequential, sample: Any, seconds: float = 1.0, device: torch.device | str | int | None = None
) -> list[StageTimes]:
    """Measures each layer in training mode, as a copy on the device (None: the module's); see `balance_by_time`."""
    layer_seconds = seconds / len(module)
    return _measure_layers(
        module, sample, device, lambda layer, inputs, place: _measure_times(layer, inputs, place, layer_seconds)
    )


def layer_bytes(module: nn.Sequential, sample: Any, device: torch.device | str | int | None = None) -> list[LayerBytes]:
    """Counts the memory of each layer after its forward in training mode, as a copy on the device."""
    return _measure_layers(module, sample, device, _measure_bytes)


def _measure_layers(
    module: nn.Sequential,
    sample: Any,
    device: torch.device | str | int | None,
    measure: Callable[[nn.Module, _Inputs, torch.device], tuple[T, _Inputs]],
) -> list[T]:
    """Measures a copy of each layer in training mode on the output of the one before, one at a time."""
    target_device = _device_of(module, sample) if device is None else torch.device(device)
    devices = [target_device] if target_device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=target_device.type if devices else "cuda"):
        inputs = _Inputs((map_tensors(lambda tensor: tensor.to(target_device), sample),), {}, {})
        results = []
        for name, layer in module.named_children():
            with _noting_errors(f"layer {name!r}", layer):
                result, inputs = measure(training_copy(layer, target_device), inputs, target_device)
            results.append(result)
    return results


def training_copy(layer: nn.Module, device: torch.device) -> nn.Module:
    """Returns a copy of a layer on a device in training mode, to be measured in its place."""
    return copy.deepcopy(layer).to(device).train()


@contextmanager
def _noting_errors(title: str, module: nn.Module) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"where {title}, a {type(module).__name__}, was measured")
        raise


def _measure_bytes(module: nn.Module, inputs: _Inputs, device: torch.device) -> tuple[LayerBytes, _Inputs]:
    """Counts the live bytes after a forward; returns them and the next layer's inputs."""
    copies, _ = _copied(inputs)
    live = LiveMemory(device)
    with torch.enable_grad(), live:
        output, stashed = run_with_skips(module, copies.skips, *copies.args)
    layer_bytes = LayerBytes(live.current_bytes, storage_bytes(list(module.parameters())))
    live.close()
    return layer_bytes, _next_inputs(module, inputs, output, stashed)


def _measure_times(
    module: nn.Module, inputs: _Inputs, device: torch.device, seconds: float
) -> tuple[StageTimes, _Inputs]:
    """Runs a module until the time is spent, twice at least; returns its least times, and the next one's inputs."""
    with single_threaded(device):
        _, next_inputs = _run(module, inputs, device)  # Kernels are prepared at the first call.
        runs, end = [_run(module, inputs, device)[0]], _now(device) + seconds
        while _now(device) < end:
            runs.append(_run(module, inputs, device)[0])
    return StageTimes(*map(min, zip(*runs, strict=True))), next_inputs


def _now(device: torch.device) -> float:
    """Returns the wall clock's time after the device has finished."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _run(module: nn.Module, inputs: _Inputs, device: torch.device) -> tuple[StageTimes, _Inputs]:
    copies, leaves = _copied(inputs)
    times = [_now(device)]
    with torch.enable_grad():
        output, stashed = run_with_skips(module, copies.skips, *copies.args, **copies.kwargs)
    times.append(_now(device))
    roots = [tensor for tensor in tensors_in((output, list(stashed.values()))) if tensor.requires_grad]
    edges = [compat.gradient_edge(root) for root in roots]
    backward = SplitBackward(edges, leaves)
    ones = [torch.ones_like(root) for root in roots]
    next_inputs = _next_inputs(module, inputs, output, stashed)
    del roots, output
    times.append(_now(device))
    if backward.run_inputs(ones) is None:
        torch.autograd.backward(edges, ones)
    del edges  # They would keep what the second pass does not need.
    times.append(_now(device))
    backward.run_weights()
    times.append(_now(device))
    return StageTimes(times[1] - times[0], times[3] - times[2], times[4] - times[3]), next_inputs


def _copied(inputs: _Inputs) -> tuple[_Inputs, list[Tensor]]:
    """Returns copies that a module may write into, and the leaves that get gradients."""
    leaves: list[Tensor] = []

    def copied(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf.clone()

    args, kwargs, *skips = map_tensors(copied, (inputs.args, dict(inputs.kwargs), *inputs.skips.values()))
    return _Inputs(args, kwargs, dict(zip(inputs.skips, skips, strict=True))), leaves


def _next_inputs(module: nn.Module, inputs: _Inputs, output: Any, stashed: Mapping[SkipKey, Any]) -> _Inputs:
    """Returns the inputs of the next module; tensors with a gradient require one there."""
    popped = set(popped_keys(module))
    skips = {key: tree for key, tree in inputs.skips.items() if key not in popped}
    args, new = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), ((output,), stashed))
    return _Inputs(args, {}, {**skips, **new})


def _device_of(module: nn.Module, given: Any) -> torch.device:
    tensors: Iterator[Tensor] = chain(module.parameters(), tensors_in(given))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))
