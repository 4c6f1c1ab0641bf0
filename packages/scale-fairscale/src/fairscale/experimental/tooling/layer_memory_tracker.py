"""`LayerwiseMemoryTracker` and what belongs to it: FairScale's names on scale-checkpoint's tracker."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn

from fairscale._warnings import warn_argument
from scale_checkpoint import LayerMemoryTracker, LayerTrace, SuggestedCheckpoints, suggest_checkpoint_location
from scale_checkpoint.memory_tracker import find_best_reset_points


@dataclass(frozen=True)
class LayerMemoryTrace(LayerTrace):
    """A pass through a module, with what FairScale's traces have by their names.

    Attributes:
        module_params: Bytes of the module's own parameters.
        all_gathered: 0: gathers are traced by a profiler, under `scale_fsdp::all_gather`.
        cumul_all_gathered: 0.
    """

    module_params: int = 0
    all_gathered: int = 0
    cumul_all_gathered: int = 0

    @property
    def allocated(self) -> int:
        """What lived when the pass ended, over the memory at the start."""
        return self.end_bytes

    @property
    def reserved(self) -> int:
        """The same: what an allocator caches is not counted."""
        return self.end_bytes

    @property
    def event(self) -> LayerMemoryTrace:
        """Itself, which has `memory_diff` and `memory_activations`."""
        return self

    @property
    def memory_activations(self) -> int:
        """What a forward has left behind."""
        return max(0, self.memory_diff) if self.is_forward else 0


class LayerwiseMemoryTrackerSummary(NamedTuple):
    """What a tracker has found, in bytes."""

    max_memory_allocated: int
    max_memory_cached: int
    total_activation_allocations: int
    total_forward_allocations: int
    top_forward_activation_producers: list[LayerTrace]


class LayerwiseMemoryTracker(LayerMemoryTracker):
    """scale-checkpoint's tracker, with FairScale's summary and plot.

    >>> import torch
    >>> from fairscale.experimental.tooling.layer_memory_tracker import LayerwiseMemoryTracker
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
    >>> tracker = LayerwiseMemoryTracker()
    >>> tracker.monitor(model)
    >>> model(torch.ones(2, 4)).sum().backward()
    >>> tracker.stop()
    >>> {"0", "1"} <= {trace.module_name for trace in tracker.forward_traces}
    True
    """

    def __init__(self) -> None:
        super().__init__()
        self._param_bytes: dict[str, int] = {}

    def monitor(self, model: nn.Module) -> None:
        """Starts to follow a model."""
        for name, module in model.named_modules():
            self._param_bytes[name] = sum(param.nbytes for param in module.parameters(recurse=False))
        super().monitor(model)

    @property
    def memory_traces(self) -> list[LayerTrace]:
        """Every pass through a module that has changed anything, in the order of time."""
        return [
            trace
            if isinstance(trace, LayerMemoryTrace)
            else LayerMemoryTrace(**vars(trace), module_params=self._param_bytes.get(trace.module_name, 0))
            for trace in super().memory_traces
        ]

    @classmethod
    def load(cls, path: str | PathLike[str]) -> LayerwiseMemoryTracker:
        """Returns a tracker with the traces that `save_traces` has written."""
        tracker = cls()
        tracker._finished = [LayerMemoryTrace(**entry) for entry in json.loads(Path(path).read_text("utf-8"))]
        return tracker

    @property
    def summary(self) -> LayerwiseMemoryTrackerSummary:  # type: ignore[override]  # a text there
        """The largest figures."""
        kept = [trace.memory_diff for trace in self.forward_traces if trace.module_name]
        return LayerwiseMemoryTrackerSummary(
            max_memory_allocated=self.max_memory,
            max_memory_cached=self.max_memory,
            total_activation_allocations=sum(size for size in kept if size > 0),
            total_forward_allocations=sum(kept),
            top_forward_activation_producers=self.top_forward_activation_producers(10),
        )

    def show_plots(self, figsize: tuple[int, int] = (16, 20), capture: bool = False) -> Any:
        """Draws the traces; needs matplotlib.

        Args:
            figsize: Without effect.
            capture: Return the picture, an array [height, width, 4], in place of showing it.
        """
        if figsize != (16, 20):
            warn_argument("show_plots", "figsize", "has no effect: tracker.plot(path) writes a file to be scaled")
        from matplotlib import pyplot

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "memory.png"
            self.plot(path)
            picture = pyplot.imread(path)
        if capture:
            return picture
        pyplot.imshow(picture)
        pyplot.show()
        return None

    def __str__(self) -> str:
        return self.table()


class ProcessGroupTrackingEvent(Enum):
    """What a tracker of a group tells of."""

    allgather = auto()


class ProcessGroupTracker:
    """A process group that tells a listener of each all-gather through it, with the bytes that it makes.

    Wrappers that are given one use the group itself: their gathers are in the trace of a profiler.

    Args:
        group: The group; None is the default one.
        listener: Called with an event and the bytes.
    """

    def __init__(self, group: Any, listener: Callable[..., Any] | None = None) -> None:
        self.group: Any = dist.group.WORLD if group is None else group
        self.tracked_group = self.group
        self.listener = listener

    def _tell(self, outputs: Sequence[Tensor], start: float) -> None:
        if self.listener is not None:
            size = sum(each.numel() * each.element_size() for each in outputs)
            self.listener(ProcessGroupTrackingEvent.allgather, size, [each.shape for each in outputs], start)

    def allgather(self, output_tensors: Any, input_tensors: Any, *args: Any, **kwargs: Any) -> Any:
        """All-gathers through the group."""
        start = time.perf_counter()
        work = self.group.allgather(output_tensors, input_tensors, *args, **kwargs)
        self._tell([each for many in output_tensors for each in many], start)
        return work

    def _allgather_base(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        work = self.group._allgather_base(output_tensor, input_tensor, *args, **kwargs)
        self._tell([output_tensor], start)
        return work

    def __getattr__(self, name: str) -> Any:
        if name in ("group", "tracked_group"):
            raise AttributeError(name)
        return getattr(self.group, name)


def compare_memory_traces_in_plot(
    memory_traces_by_job: Mapping[str, Sequence[LayerTrace]],
    figsize: tuple[int, int] = (16, 20),
    capture: bool = False,
) -> Any:
    """Draws the peaks of several runs' passes beside each other; needs matplotlib.

    Args:
        memory_traces_by_job: The traces of each, by a name.
        figsize: Of the picture, in inches.
        capture: Return the figure in place of showing it.
    """
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=figsize)
    for name, traces in memory_traces_by_job.items():
        axes.plot([trace.peak_bytes / 2**20 for trace in traces], label=name)
    axes.set_xlabel("pass")
    axes.set_ylabel("MiB at its peak")
    axes.legend()
    if capture:
        return figure
    pyplot.show()
    return None


__all__ = [
    "LayerMemoryTrace",
    "LayerTrace",
    "LayerwiseMemoryTracker",
    "LayerwiseMemoryTrackerSummary",
    "ProcessGroupTracker",
    "ProcessGroupTrackingEvent",
    "SuggestedCheckpoints",
    "compare_memory_traces_in_plot",
    "find_best_reset_points",
    "suggest_checkpoint_location",
]
