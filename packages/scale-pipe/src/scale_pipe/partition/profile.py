"""What layers and stages take, measured on the machine that will run them; nothing is left of the measurement."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from scale_checkpoint.live_memory import LiveBytes, storage_bytes
from scale_checkpoint.planner.step import steady, undisturbed
from scale_core import compat
from scale_core.tree import map_tensors, tensors_in
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.skip.namespace import SkipKey, popped_by
from scale_pipe.skip.tracker import run_with_skips
from scale_pipe.split_backward import Backward

T = TypeVar("T")


class StageTimes(NamedTuple):
    """Seconds of wall clock of one micro-batch, until all of it is done: a layer that waits takes time as well.

    They are the least of several runs, which is what other programs on the machine disturb least; on the CPU with one
    thread, since threads that wait for one another are disturbed most.

    Attributes:
        forward: Of the forward.
        input_gradient: Of the gradient of the input; of the first stage next to nothing.
        weight_gradient: Of the gradients of the parameters.
    """

    forward: float
    input_gradient: float
    weight_gradient: float


class LayerBytes(NamedTuple):
    """What a layer holds.

    Attributes:
        activations: What it keeps of one micro-batch between forward and backward, its output included.
        parameters: Its parameters.
    """

    activations: int
    parameters: int


class _Passing(NamedTuple):
    """What goes from one module to the next.

    Attributes:
        args: By position.
        kwargs: By keyword.
        skips: By key, what later ones pop.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    skips: Mapping[SkipKey, Any]


def profile_stages(
    stages: Sequence[nn.Module], *args: Any, timeout: float = 1.0, link: float | Sequence[float] = 0.0, **kwargs: Any
) -> Costs:
    """Measures the stages of a model, as `solve` and `simulate` take it.

    Each stage runs by itself on what the one before returns, in the mode that it is in. What counts is the wall clock,
    and of its runs the quickest, on the CPU with one thread. Gradients, buffers and random numbers are afterwards what
    they were.

        >>> import torch
        >>> from scale_pipe import profile_stages, solve, split
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
        >>> costs = profile_stages(split(model, ["1", "2", "3"]), torch.randn(4, 8), timeout=0.01)
        >>> solve(costs, num_ranks=2, num_micro_batches=4, visits=1000).schedule.num_stages
        4

    Args:
        stages: Of `split`, or any modules that follow one another.
        args: One micro-batch, as the first stage takes it.
        timeout: Seconds of wall clock to spend on all stages, after each has run twice.
        link: Seconds of a transfer, of all links or by link.
        kwargs: For the first stage, by keyword.

    Raises:
        TypeError: The stages are one module, and no list.
        ValueError: There is no stage, or the number of links is not one less than that of stages.
        Exception: What a stage has raised, with a note on which one.
    """
    given_stages: object = stages
    if not isinstance(given_stages, Iterable):
        raise TypeError(
            f"stages are a list of modules, but got one {type(given_stages).__name__}: write [module], or what "
            "split(module, [...]) returns"
        )
    if not stages:
        raise ValueError("there are no stages to be measured; give the list that split(model, [...]) returns")
    given, times = _Passing(args, kwargs, {}), []
    for number, stage in enumerate(stages):
        device = next((p.device for p in stage.parameters()), _device_of(given))
        with _named(f"stage {number}", stage), undisturbed(stage):
            found, given = _times(stage, given, device, timeout / len(stages))
        times.append(found)
    forward, input_gradient, weight_gradient = zip(*times, strict=True)
    return Costs.measured(forward, input_gradient, weight_gradient, link)


def layer_times(
    module: nn.Sequential, sample: Any, timeout: float = 1.0, device: torch.device | str | int | None = None
) -> list[StageTimes]:
    """Measures each layer in training mode, as a copy on the device; the module is not touched.

    Args:
        module: The layers.
        sample: What the first one takes, on any device.
        timeout: Seconds of wall clock to spend on all layers, after each has run twice.
        device: Where; None for that of the module.
    """
    return _each_layer(
        module, sample, device, lambda layer, given, place: _times(layer, given, place, timeout / len(module))
    )


def layer_bytes(module: nn.Sequential, sample: Any, device: torch.device | str | int | None = None) -> list[LayerBytes]:
    """Counts what each layer holds after its forward in training mode; the module is not touched.

    Args:
        module: The layers.
        sample: What the first one takes, on any device.
        device: Where; None for that of the module.
    """
    return _each_layer(module, sample, device, _bytes)


def _each_layer(
    module: nn.Sequential,
    sample: Any,
    device: torch.device | str | int | None,
    measure: Callable[[nn.Module, _Passing, torch.device], tuple[T, _Passing]],
) -> list[T]:
    """Measures a copy of each layer in training mode on what the one before has returned, one at a time."""
    place = torch.device(device) if device is not None else next((p.device for p in module.parameters()), None)
    place = place or next((tensor.device for tensor in tensors_in(sample)), torch.device("cpu"))
    with _random_numbers_kept(place):
        given = _Passing((map_tensors(lambda tensor: tensor.to(place), sample),), {}, {})
        results = []
        for name, layer in module.named_children():
            with _named(f"layer {name!r}", layer):
                result, given = measure(copy.deepcopy(layer).to(place).train(), given, place)
            results.append(result)
    return results


@contextmanager
def _named(title: str, module: nn.Module) -> Iterator[None]:
    """Says in errors of a module which one it is."""
    try:
        yield
    except Exception as error:
        error.add_note(f"where {title}, a {type(module).__name__}, was measured")
        raise


@contextmanager
def _random_numbers_kept(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        yield


def _bytes(module: nn.Module, given: _Passing, device: torch.device) -> tuple[LayerBytes, _Passing]:
    """Counts what lives after a forward."""
    entered, _ = _entered(given)
    live = LiveBytes(device)
    with torch.enable_grad(), live:
        output, stashed = run_with_skips(module, entered.skips, *entered.args)
    found = LayerBytes(live.current_bytes, storage_bytes(list(module.parameters())))
    live.close()
    return found, _next(module, given, output, stashed)


def _times(module: nn.Module, given: _Passing, device: torch.device, timeout: float) -> tuple[StageTimes, _Passing]:
    """Runs a module until the time is spent, twice at least; returns the least of its times, and what follows."""
    with steady(device):
        _, passed = _run(module, given, device)  # Kernels prepare themselves at the first call.
        runs, end = [_run(module, given, device)[0]], _now(device) + timeout
        while _now(device) < end:
            runs.append(_run(module, given, device)[0])
    return StageTimes(*map(min, zip(*runs, strict=True))), passed


def _now(device: torch.device) -> float:
    """Returns the wall clock's time, when all that the device was given to do is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def _run(module: nn.Module, given: _Passing, device: torch.device) -> tuple[StageTimes, _Passing]:
    entered, leaves = _entered(given)
    times = [_now(device)]
    with torch.enable_grad():
        output, stashed = run_with_skips(module, entered.skips, *entered.args, **entered.kwargs)
    times.append(_now(device))
    roots = [tensor for tensor in tensors_in((output, list(stashed.values()))) if tensor.requires_grad]
    backward = Backward([compat.gradient_edge(root) for root in roots], leaves)
    ones = [torch.ones_like(root) for root in roots]
    passed = _next(module, given, output, stashed)
    del roots, output
    times.append(_now(device))
    backward.run_inputs(ones)
    times.append(_now(device))
    backward.run_weights()
    times.append(_now(device))
    return StageTimes(times[1] - times[0], times[3] - times[2], times[4] - times[3]), passed


def _entered(given: _Passing) -> tuple[_Passing, list[Tensor]]:
    """Returns what a module is given, as copies that it may write into, and the leaves that want gradients."""
    leaves: list[Tensor] = []

    def enter(tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if tensor.requires_grad:
            leaves.append(leaf.requires_grad_())
        return leaf.clone()

    args, kwargs, *skips = map_tensors(enter, (given.args, dict(given.kwargs), *given.skips.values()))
    return _Passing(args, kwargs, dict(zip(given.skips, skips, strict=True))), leaves


def _next(module: nn.Module, given: _Passing, output: Any, stashed: Mapping[SkipKey, Any]) -> _Passing:
    """Returns what the next module is given; what has a gradient asks for one there."""
    popped = set(popped_by(module))
    skips = {key: tree for key, tree in given.skips.items() if key not in popped}
    args, new = map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), ((output,), stashed))
    return _Passing(args, {}, {**skips, **new})


def _device_of(given: _Passing) -> torch.device:
    return next((tensor.device for tensor in tensors_in((given.args, dict(given.kwargs)))), torch.device("cpu"))
