"""`LayerwiseMemoryTracker` and what belongs to it: FairScale's names on scale-checkpoint's tracker."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

from fairscale._warnings import warn_argument
from scale_checkpoint import LayerMemoryTracker, LayerTrace, SuggestedCheckpoints, suggest_checkpoint_location
from scale_checkpoint.memory_tracker import find_best_reset_points


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
    >>> [trace.module_name for trace in tracker.forward_traces if trace.module_name]
    ['0', '1']
    """

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
            capture: Return the picture, which needs Pillow, in place of showing it.
        """
        if figsize != (16, 20):
            warn_argument("show_plots", "figsize", "has no effect: tracker.plot(path) writes a file to be scaled")
        import tempfile
        from pathlib import Path

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "memory.png"
            self.plot(path)
            from PIL import Image

            picture = Image.open(path)
            picture.load()
        if capture:
            return picture
        picture.show()
        return None

    def __str__(self) -> str:
        return self.table()


class ProcessGroupTrackingEvent(Enum):
    """What a tracker of a group tells of."""

    allgather = auto()


class ProcessGroupTracker:
    """A process group that tells a listener of each all-gather through it, with the bytes that it makes.

    Args:
        group: The group; None is the default one.
        listener: Called with an event and the bytes.
    """

    def __init__(self, group: Any, listener: Callable[..., Any] | None = None) -> None:
        self.group = dist.group.WORLD if group is None else group
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
        if name == "group":
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
