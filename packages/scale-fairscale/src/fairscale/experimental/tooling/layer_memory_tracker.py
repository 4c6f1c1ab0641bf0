"""`LayerwiseMemoryTracker` and what belongs to it: FairScale's traces, by scale-checkpoint's count of live memory."""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum, auto
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scale_checkpoint import suggest_checkpoint_location as suggest_for_layer_traces
from scale_checkpoint.live_memory import LiveMemory
from scale_checkpoint.memory_tracker import LayerTrace, SuggestedCheckpoints, find_best_reset_points
from scale_checkpoint.planner.step import device_of
from scale_core.flat.buffer import State
from scale_core.tree import tensors_in
from scale_fsdp.runtime.unit import Unit, units_in


class TraceForwardEvent(NamedTuple):
    """What a forward pass of a module has left behind.

    Attributes:
        memory_diff: How many more bytes live when it ends than when it began.
        memory_activations: The bytes of its outputs that are no views of its inputs.
    """

    memory_diff: int
    memory_activations: int


class TraceBackwardEvent(NamedTuple):
    """What a backward pass of a module has made.

    Attributes:
        memory_activations: The bytes of its gradients that are not views of the gradients of its outputs.
    """

    memory_activations: int


class LayerMemoryTrace(NamedTuple):
    """A pass through a module that calls no other.

    Attributes:
        module_name: Qualified.
        module_params: The bytes of its parameters.
        allocated: What lives when the pass ends, over what lived when `monitor` was called.
        reserved: The same: what an allocator caches is not counted.
        is_forward: Whether it is a forward or a backward.
        all_gathered: What wrappers have gathered for it, since the pass before.
        cumul_all_gathered: What wrappers hold gathered when a forward ends; 0 of a backward.
        event: What it has made.
    """

    module_name: str
    module_params: int
    allocated: int
    reserved: int
    is_forward: bool
    all_gathered: int
    cumul_all_gathered: int
    event: TraceForwardEvent | TraceBackwardEvent

    def to_dict(self) -> dict[str, Any]:
        """As values that JSON has."""
        return {**self._asdict(), "event": self.event._asdict()}

    @classmethod
    def from_dict(cls, serialized: Mapping[str, Any]) -> LayerMemoryTrace:
        """What `to_dict` was called on."""
        kind = TraceForwardEvent if serialized["is_forward"] else TraceBackwardEvent
        return cls(**{**serialized, "event": kind(**serialized["event"])})


@dataclass
class LayerwiseMemoryTrackerSummary:
    """What a tracker has found, in bytes."""

    max_memory_allocated: int
    max_memory_cached: int
    total_activation_allocations: int
    total_forward_allocations: int
    top_forward_activation_producers: list[LayerMemoryTrace]


class LayerwiseMemoryTracker:
    """Follows the memory of a model's innermost modules in forward and backward, on any device.

    In new code: `scale_checkpoint.LayerMemoryTracker`, which also knows peaks inside of passes.

    >>> import torch
    >>> from fairscale.experimental.tooling.layer_memory_tracker import LayerwiseMemoryTracker
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> tracker = LayerwiseMemoryTracker()
    >>> tracker.monitor(model)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> tracker.stop()
    >>> [trace.module_name for trace in tracker.memory_traces]
    ['0', '1', '1', '0']

    Attributes:
        memory_traces: Every pass, in the order of time.
    """

    def __init__(self) -> None:
        self.memory_traces: list[LayerMemoryTrace] = []
        self._memory: LiveMemory | None = None
        self._stack = ExitStack()
        self._entered: str | None = None  # The module that was entered last, if none was left since.
        self._start_bytes = 0
        self._units: list[Unit] = []
        self._gathered: dict[int, int] = {}  # The bytes of each gathered buffer, by its identity.

    def monitor(self, model: nn.Module) -> None:
        """Starts to follow a model, until `stop()`.

        Raises:
            RuntimeError: The tracker follows one already.
        """
        if self._memory is not None:
            raise RuntimeError("a tracker follows one model at a time; call tracker.stop() first")
        self._memory = self._stack.enter_context(LiveMemory(device_of(model)))
        self._units, self._gathered = units_in(model), {}
        for name, module in model.named_modules():
            for handle in self._register_hooks(name, module, self._memory):
                self._stack.callback(handle.remove)

    def stop(self) -> None:
        """Stops to follow; the traces stay."""
        self._stack.close()
        if self._memory is not None:
            self._memory.close()
        self._memory, self._entered = None, None

    def clear_traces(self) -> None:
        """Forgets every pass so far."""
        self.memory_traces.clear()

    @property
    def forward_traces(self) -> list[LayerMemoryTrace]:
        """The forward passes, in order."""
        return [trace for trace in self.memory_traces if trace.is_forward]

    @property
    def backward_traces(self) -> list[LayerMemoryTrace]:
        """The backward passes, in order."""
        return [trace for trace in self.memory_traces if not trace.is_forward]

    @property
    def max_memory_allocated(self) -> int:
        """The most bytes that lived when a pass ended."""
        return max((trace.allocated for trace in self.memory_traces), default=0)

    @property
    def max_memory_cached(self) -> int:
        """The same."""
        return self.max_memory_allocated

    @property
    def summary(self) -> LayerwiseMemoryTrackerSummary:
        """The figures of all forward passes together, and the largest ones."""
        events = [cast(TraceForwardEvent, trace.event) for trace in self.forward_traces]
        return LayerwiseMemoryTrackerSummary(
            max_memory_allocated=self.max_memory_allocated,
            max_memory_cached=self.max_memory_cached,
            total_activation_allocations=sum(event.memory_activations for event in events),
            total_forward_allocations=sum(event.memory_diff for event in events),
            top_forward_activation_producers=self.top_forward_activation_producers(top=10),
        )

    def top_forward_activation_producers(self, top: int = 10) -> list[LayerMemoryTrace]:
        """Returns the forward passes with the largest outputs, the largest first."""
        return sorted(self.forward_traces, key=lambda trace: -trace.event.memory_activations)[:top]

    def show_plots(self, figsize: tuple[int, int] = (16, 20), capture: bool = False) -> Any:
        """Draws the traces, as `compare_memory_traces_in_plot` does."""
        return compare_memory_traces_in_plot({"run": self.memory_traces}, figsize=figsize, capture=capture)

    def save_traces(self, path: str | PathLike[str]) -> None:
        """Writes the traces as JSON."""
        content = {"traces": [trace.to_dict() for trace in self.memory_traces]}
        Path(path).write_text(json.dumps(content) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> LayerwiseMemoryTracker:
        """Returns a tracker with the traces that `save_traces` has written, here or in FairScale."""
        tracker = cls()
        traces = json.loads(Path(path).read_text("utf-8"))["traces"]
        tracker.memory_traces = [LayerMemoryTrace.from_dict(trace) for trace in traces]
        return tracker

    def _register_hooks(self, name: str, module: nn.Module, memory: LiveMemory) -> list[Any]:
        def before(module: nn.Module, inputs: Any) -> None:
            self._entered, self._start_bytes = name, memory.current_bytes

        def after(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if self._entered == name:  # It has called no other.
                diff = memory.current_bytes - self._start_bytes
                self._add(name, module, TraceForwardEvent(diff, _new_bytes(inputs, outputs)))
                node = next((tensor.grad_fn for tensor in tensors_in(outputs) if tensor.grad_fn is not None), None)
                if node is not None:
                    node.register_hook(after_backward)
            self._entered = None

        def after_backward(gradients: Sequence[Tensor | None], of_outputs: Sequence[Tensor | None]) -> None:
            if self._memory is memory:
                self._add(name, module, TraceBackwardEvent(_new_bytes(of_outputs, gradients)))

        # Between the hooks of a wrapper, which gather before and release after.
        handles = [module.register_forward_pre_hook(before), module.register_forward_hook(after, prepend=True)]
        return [*handles, module.register_forward_hook(lambda *_: self._forget_released())]

    def _add(self, name: str, module: nn.Module, event: TraceForwardEvent | TraceBackwardEvent) -> None:
        assert self._memory is not None
        num_bytes, is_forward = self._memory.current_bytes, isinstance(event, TraceForwardEvent)
        params = sum(param.nbytes for param in module.parameters())
        before, self._gathered = self._gathered, self._gathered_now()
        gathered = sum(size for key, size in self._gathered.items() if key not in before)
        gathered_bytes = sum(self._gathered.values()) if is_forward else 0
        trace = LayerMemoryTrace(name, params, num_bytes, num_bytes, is_forward, gathered, gathered_bytes, event)
        self.memory_traces.append(trace)

    def _forget_released(self) -> None:
        now = self._gathered_now()
        self._gathered = {key: size for key, size in self._gathered.items() if key in now}

    def _gathered_now(self) -> dict[int, int]:
        buffers = [buffer for unit in self._units for buffer in unit.buffers if buffer.group.size > 1]
        return {id(buffer): buffer.full.nbytes for buffer in buffers if buffer.state is State.GATHERED}


def _new_bytes(before: Any, after: Any) -> int:
    """The bytes of the tensors in `after` that have no storage of one in `before`; sparse ones have none."""
    places_before, places = (
        [
            (tensor.untyped_storage().data_ptr(), tensor.nbytes)
            for tensor in tensors_in(tree)
            if tensor.layout is torch.strided
        ]
        for tree in (before, after)
    )
    earlier = {address for address, _ in places_before}
    return sum(num_bytes for address, num_bytes in places if address not in earlier)


class ProcessGroupTrackingEvent(Enum):
    """What a tracker of a group tells of."""

    allgather = auto()


class ProcessGroupTracker:
    """A process group that tells a listener of each all-gather that is called on it.

    Wrappers that are given one use the group itself: their gathers are in the trace of a profiler.

    Args:
        group: The group; None is the default one.
        listener: Called with the event, the outputs and the inputs, before the gather starts.
    """

    def __init__(self, group: Any, listener: Callable[..., Any] | None = None) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.tracked_group = self.group
        self.listener = listener

    def allgather(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """All-gathers through the group."""
        self._tell(output_tensors, input_tensors)
        return self.group.allgather(output_tensors, input_tensors, *args, **kwargs)

    def _allgather_base(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._tell(output_tensor, input_tensor)
        return self.group._allgather_base(output_tensor, input_tensor, *args, **kwargs)

    def _tell(self, outputs: Any, inputs: Any) -> None:
        if self.listener is not None:
            self.listener(ProcessGroupTrackingEvent.allgather, outputs, inputs)

    def __getattr__(self, name: str) -> Any:
        if name in ("group", "tracked_group"):
            raise AttributeError(name)
        return getattr(self.group, name)


def suggest_checkpoint_location(
    traces: Iterable[LayerMemoryTrace], num_checkpoints: int, num_skipped_layers: int = 0
) -> SuggestedCheckpoints:
    """Suggests where to split a model into parts that are checkpointed, so that the largest part is as small as can be.

    Args:
        traces: Of a tracker; of a module that runs several times the first forward counts.
        num_checkpoints: How many splits.
        num_skipped_layers: Modules at the beginning that are left out.

    Raises:
        ValueError: There are fewer modules than splits, or a number is negative.
    """
    sizes: dict[str, int] = {}
    for trace in traces:
        if trace.is_forward:
            sizes.setdefault(trace.module_name, trace.event.memory_activations)
    layers = [LayerTrace(name, "", True, 0, size, size) for name, size in sizes.items()]
    location = suggest_for_layer_traces(layers, num_checkpoints, num_skipped_layers)
    names: Any = list(location.split_modules), list(location.all_modules)  # Lists, as there.
    return SuggestedCheckpoints(location.max_memory, *names)


def compare_memory_traces_in_plot(
    memory_traces_by_job: Mapping[str, Sequence[LayerMemoryTrace]],
    figsize: tuple[int, int] = (16, 20),
    capture: bool = False,
) -> Any:
    """Draws what lives after each pass, what each has made, and the parameters, of several runs; needs matplotlib.

    Args:
        memory_traces_by_job: The traces of each, by a name.
        figsize: Of the picture, in inches.
        capture: Return the picture, a PIL image, in place of showing it.
    """
    from matplotlib import pyplot
    from PIL import Image

    figure, axes = pyplot.subplots(figsize=figsize, ncols=2, nrows=2)
    for name, traces in memory_traces_by_job.items():
        forward = [trace.event.memory_activations * trace.is_forward for trace in traces]
        rows = {
            "memory allocated": [trace.allocated for trace in traces],
            "activation allocations": [trace.event.memory_activations for trace in traces],
            "cumulative forward activations": list(itertools.accumulate(forward)),
            "parameter memory": [trace.module_params for trace in traces],
        }
        for axis, (title, sizes) in zip(axes.flat, rows.items(), strict=True):
            axis.plot([size / 2**20 for size in sizes], label=name)
            axis.set(title=title, xlabel="pass", ylabel="MiB")
            axis.legend()
    if not capture:
        pyplot.show()
        return None
    buffer = io.BytesIO()
    figure.savefig(buffer)
    pyplot.close(figure)
    return Image.open(buffer).convert("RGB")


__all__ = [
    "LayerMemoryTrace",
    "LayerwiseMemoryTracker",
    "LayerwiseMemoryTrackerSummary",
    "ProcessGroupTracker",
    "ProcessGroupTrackingEvent",
    "SuggestedCheckpoints",
    "TraceBackwardEvent",
    "TraceForwardEvent",
    "compare_memory_traces_in_plot",
    "find_best_reset_points",
    "suggest_checkpoint_location",
]
