"""Memory tracker: live memory by module over real steps, where it is made and where it peaks.

    >>> import torch
    >>> from torch import nn
    >>> from scale_checkpoint import LayerMemoryTracker
    >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    >>> with LayerMemoryTracker(model) as tracker:
    ...     model(torch.randn(32, 64)).sum().backward()
    >>> print(tracker.table())
    module  class     forward       peak    backward        peak
    ------  ------  ---------  ---------  ----------  ----------
    0       Linear  32.00 KiB  40.00 KiB   24.99 KiB  169.26 KiB
    1       GELU    32.00 KiB  72.00 KiB  -32.00 KiB  168.26 KiB
    2       Linear   8.00 KiB  80.00 KiB   64.25 KiB  168.26 KiB

A backward leaves gradients behind, and releases the tensors that the forward has kept.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import nn

from scale_checkpoint.planner.chart import MIB, format_bytes, new_figure, table
from scale_checkpoint.planner.step import device_of
from scale_checkpoint.planner.trace import StepTrace, trace_step
from scale_core.arguments import checked_arguments


@dataclass(frozen=True)
class LayerTrace:
    """One pass through a module, without the modules inside it.

        >>> import torch
        >>> from scale_checkpoint import LayerMemoryTracker
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256))
        >>> with LayerMemoryTracker(model) as tracker:
        ...     output = model(torch.randn(32, 64))
        >>> trace = next(trace for trace in tracker.memory_traces if trace.module_name == "0")
        >>> trace.end_bytes - trace.start_bytes == output.nbytes
        True

    Attributes:
        module_name: Qualified; empty for operators outside of the model.
        kind: The name of its class.
        is_forward: Whether it is a forward or a backward.
        start_bytes: The live memory when it began, minus the memory when the tracker was started.
        peak_bytes: The most that lived while it ran.
        end_bytes: The live memory when it ended.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """

    module_name: str
    kind: str
    is_forward: bool
    start_bytes: int
    peak_bytes: int
    end_bytes: int

    @property
    def memory_diff(self) -> int:
        """The memory it has left behind: in a forward activations, in a backward gradients less what it released."""
        return self.end_bytes - self.start_bytes


class LayerMemoryTracker:
    """Follows the memory of a model's modules while it is started, on any device; `print` shows it.

    Counts the storages that operators make and that live, so a figure doesn't depend on the cache of an allocator.
    Start it before a forward pass, in the thread that runs it.

    Args:
        model: To start with at once, in a `with` block; None for one that is given to `monitor`.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_checkpoint import LayerMemoryTracker
        >>> model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        >>> with LayerMemoryTracker(model) as tracker:
        ...     model(torch.randn(32, 64)).sum().backward()
        >>> [trace.module_name for trace in tracker.memory_traces if trace.is_forward]
        ['', '0', '1', '2', '']

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """

    @checked_arguments
    def __init__(self, model: nn.Module | None = None) -> None:
        self._model = model
        self._finished: list[LayerTrace] = []
        self._running: tuple[StepTrace, dict[str, str]] | None = None
        self._stack: ExitStack | None = None

    def monitor(self, model: nn.Module) -> None:
        """Starts to follow a model; a RuntimeError where the tracker follows one already."""
        if self._stack is not None:
            raise RuntimeError("a tracker follows one model at a time; call tracker.stop() first")
        trace = StepTrace(device_of(model))
        modules = {name or type(model).__name__: module for name, module in model.named_modules()}
        kinds = {name: type(module).__name__ for name, module in modules.items()}
        self._stack = ExitStack()
        self._running = trace, kinds
        self._stack.callback(self._finish)
        self._stack.enter_context(trace_step(trace, modules))

    def stop(self) -> None:
        """Stops to follow; the traces are added to `memory_traces`."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.close()

    def clear_traces(self) -> None:
        """Forgets every pass so far, also that which runs now; later ones count from the same start."""
        self._finished = []
        if self._running is not None:
            self._running[0].order.clear()

    def __enter__(self) -> Self:
        if self._model is None:
            raise ValueError("a tracker in a `with` block needs a model: with LayerMemoryTracker(model) as tracker")
        self.monitor(self._model)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def memory_traces(self) -> list[LayerTrace]:
        """Every pass that changed anything, in the order of time, and so far where the tracker is not stopped yet."""
        return self._finished if self._running is None else [*self._finished, *_layer_traces(*self._running)]

    @property
    def forward_traces(self) -> list[LayerTrace]:
        """The forward passes, in order."""
        return [trace for trace in self.memory_traces if trace.is_forward]

    @property
    def backward_traces(self) -> list[LayerTrace]:
        """The backward passes, in order."""
        return [trace for trace in self.memory_traces if not trace.is_forward]

    @property
    def max_memory(self) -> int:
        """The most bytes that lived, over the memory at the start."""
        return max((trace.peak_bytes for trace in self.memory_traces), default=0)

    @property
    def summary(self) -> str:
        """The table and the largest producers, as text."""
        largest = self.top_forward_activation_producers(5)
        names = ", ".join(f"{trace.module_name} ({format_bytes(trace.memory_diff)})" for trace in largest)
        peak = format_bytes(self.max_memory)
        return f"{self.table()}\npeak {peak} over the memory at the start; most is kept by {names}"

    def top_forward_activation_producers(self, top: int = 10) -> list[LayerTrace]:
        """Returns the forward passes that leave most behind, the largest first."""
        inside = [trace for trace in self.forward_traces if trace.module_name]
        return sorted(inside, key=lambda trace: -trace.memory_diff)[:top]

    def table(self) -> str:
        """Returns a line for each module: the memory its forwards and backwards leave behind, and their peaks."""
        rows = []
        for name in dict.fromkeys(trace.module_name for trace in self.memory_traces if trace.module_name):
            passes = [trace for trace in self.memory_traces if trace.module_name == name]
            cells = [name, passes[0].kind]
            for is_forward in (True, False):
                selected = [trace for trace in passes if trace.is_forward == is_forward]
                cells.append(format_bytes(sum(trace.memory_diff for trace in selected)))
                cells.append(format_bytes(max((trace.peak_bytes for trace in selected), default=0)))
            rows.append(cells)
        return table(("module", "class", "forward", "peak", "backward", "peak"), rows)

    def plot(self, path: str | PathLike[str]) -> None:
        """Draws memory over the passes, and the memory each forward leaves behind; needs matplotlib."""
        figure = new_figure(height=6)
        above, below = figure.subplots(2)
        for is_forward, label in ((True, "forward"), (False, "backward")):
            chosen = [
                (index, trace) for index, trace in enumerate(self.memory_traces) if trace.is_forward == is_forward
            ]
            above.plot([i for i, _ in chosen], [t.peak_bytes / MIB for _, t in chosen], ".", label=label, gid=label)
        above.set_xlabel("pass")
        above.set_ylabel("MiB at its peak")
        above.legend()
        forward = [trace for trace in self.forward_traces if trace.module_name]
        bars = below.bar(range(len(forward)), [trace.memory_diff / MIB for trace in forward])
        for bar, trace in zip(bars, forward, strict=True):
            bar.set_gid(trace.module_name)
        if len(forward) <= 40:
            below.set_xticks(range(len(forward)), [trace.module_name for trace in forward], rotation=90, fontsize=7)
        below.set_ylabel("MiB left by its forward")
        figure.savefig(path)

    def save_traces(self, path: str | PathLike[str]) -> None:
        """Writes the traces as JSON, in the place of a file that is there."""
        content = [asdict(trace) for trace in self.memory_traces]
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> LayerMemoryTracker:
        """Returns a tracker with the traces that `save_traces` has written."""
        tracker = cls()
        tracker._finished = [LayerTrace(**entry) for entry in json.loads(Path(path).read_text("utf-8"))]
        return tracker

    def __str__(self) -> str:
        return self.summary

    def _finish(self) -> None:
        self._finished, self._running = self.memory_traces, None


def _layer_traces(trace: StepTrace, kinds: dict[str, str]) -> list[LayerTrace]:
    traces = []
    for index, is_backward in trace.order:
        visit = trace.visits[index]
        run = visit.backward if is_backward else visit.forward
        assert run is not None
        sizes = (run.start_bytes, run.peak_bytes, trace.current_bytes if run is trace.running else run.end_bytes)
        if len(set(sizes)) > 1:  # Between two of its children a module often does nothing.
            traces.append(LayerTrace(visit.name, kinds.get(visit.name, ""), not is_backward, *sizes))
    return traces


@dataclass(frozen=True)
class SuggestedCheckpoints:
    """Where to checkpoint.

        >>> from scale_checkpoint.memory_tracker import LayerTrace, suggest_checkpoint_location
        >>> forward = [LayerTrace(name, "Linear", True, 0, size, size) for name, size in zip("abcde", [4, 1, 3, 6, 2])]
        >>> suggest_checkpoint_location(forward, num_checkpoints=1)
        SuggestedCheckpoints(max_memory=8, split_modules=('d',), all_modules=('a', 'b', 'c', 'd', 'e'))

    Attributes:
        max_memory: The most bytes between two neighboring checkpoints.
        split_modules: The modules at which a new checkpointed part begins.
        all_modules: The modules that were considered.

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """

    max_memory: int
    split_modules: tuple[str, ...]
    all_modules: tuple[str, ...]


@checked_arguments
def suggest_checkpoint_location(
    traces: Sequence[LayerTrace], num_checkpoints: int, num_skipped_layers: int = 0
) -> SuggestedCheckpoints:
    """Suggests where to split a model into parts that are checkpointed, so that the largest part is as small as can be.

    Looks at the memory each forward leaves behind. `plan_memory` decides by time as well, and gives the cost.

    Args:
        traces: Of a tracker.
        num_checkpoints: How many splits.
        num_skipped_layers: Forward passes at the beginning that are left out.

    Raises:
        ValueError: There are fewer passes than splits, or a number is negative.

    Example:
        >>> from scale_checkpoint.memory_tracker import LayerTrace, suggest_checkpoint_location
        >>> forward = [LayerTrace(name, "Linear", True, 0, size, size) for name, size in zip("abcde", [4, 1, 3, 6, 2])]
        >>> suggest_checkpoint_location(forward, num_checkpoints=1).split_modules
        ('d',)

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    passes = [trace for trace in traces if trace.is_forward and trace.module_name][num_skipped_layers:]
    if num_checkpoints < 0 or num_skipped_layers < 0 or num_checkpoints >= max(1, len(passes)):
        raise ValueError(
            f"expected more than {num_checkpoints} forward passes for {num_checkpoints} checkpoints, got {len(passes)} "
            f"after {num_skipped_layers} skipped layers; run a forward inside `with LayerMemoryTracker(model) as "
            "tracker`"
        )
    max_memory, splits = find_best_reset_points([max(0, trace.memory_diff) for trace in passes], num_checkpoints)
    names = tuple(trace.module_name for trace in passes)
    return SuggestedCheckpoints(max_memory, tuple(names[split] for split in splits), names)


def find_best_reset_points(activation_sizes: Sequence[int], num_checkpoints: int) -> tuple[int, list[int]]:
    """Cuts a row of sizes into `num_checkpoints` + 1 parts, the largest sum being as small as can be.

    >>> find_best_reset_points([4, 1, 3, 6, 2], 1)
    (8, [3])
    """
    low, high = max(activation_sizes, default=0), sum(activation_sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(activation_sizes, middle)) <= num_checkpoints:
            high = middle
        else:
            low = middle + 1
    cuts = _cuts(activation_sizes, low)
    spare = [index for index in range(1, len(activation_sizes)) if index not in cuts]
    return low, sorted(cuts + spare[: num_checkpoints - len(cuts)])


def _cuts(sizes: Sequence[int], most: int) -> list[int]:
    """Where parts begin if the sum of each is at most `most`."""
    cuts, filled = [], 0
    for index, size in enumerate(sizes):
        filled += size
        if filled > most:
            cuts.append(index)
            filled = size
    return cuts
