"""Memory of a step by segment: forward by the calls of the blocks, backward by autograd's sequence numbers.

Autograd numbers its nodes as the forward makes them, and on one device runs them from the highest number down. So the
numbers at which blocks begin and end in the forward give the block of any operator in the backward, which visits the
segments in the reverse order of the forward. No hook is on any tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scale_checkpoint.live_memory import LiveMemory
from scale_checkpoint.tree import unique_tensors

OUTSIDE_BLOCKS = ""
"""The name of visits of no block."""

_ALWAYS_FIRST = 2**63
"""Nodes that accumulate a gradient run as soon as they can, and are numbered from here on."""


@dataclass
class TracedPass:
    """Live bytes in the forward or the backward of a visit."""

    start_bytes: int  # when it was entered
    peak_bytes: int
    end_bytes: int = 0
    # Its peak without the marker, since a storage of the marker's size was made in it.
    peak_after_marker_bytes: int | None = None


@dataclass
class Visit:
    """One visit of a block, or the code between two visits."""

    name: str  # the block's, or `OUTSIDE_BLOCKS`
    node: int  # the number that autograd's next node had when the visit began
    forward: TracedPass
    backward: TracedPass | None = None
    # Numbers of storages; of saved tensors, in order, those that no other hook took.
    saved: list[int] = field(default_factory=list)
    # Of blocks alone:
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    input_requires_grad: list[bool] = field(default_factory=list)
    output_requires_grad: bool = False


class StepTrace(LiveMemory):
    """Live memory of one step by visits of the given blocks; use with `trace_step`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.visits: list[Visit] = []  # in the order of the forward
        # By time, the index of the visit that was entered, and whether in the backward.
        self.order: list[tuple[int, bool]] = []
        self.sizes: dict[int, int] = {}  # of every counted storage, by number, released ones too
        self.producer: dict[int, int] = {}  # the visit of the forward that made a storage
        self.marker_bytes = -1  # see `TracedPass.peak_after_marker_bytes`
        self._nodes: list[int] = []
        self.running: TracedPass | None = None  # the pass that has begun and not ended; None after `finish`
        self._visit = -1
        self._backward = False
        self._inside = [OUTSIDE_BLOCKS]

    def enter(self, name: str) -> Visit:
        """Begins a visit of the forward."""
        self._backward = False
        visit = Visit(name, _next_node(), self._begin())
        self.visits.append(visit)
        self._nodes.append(visit.node)
        self.order.append((len(self.visits) - 1, False))
        return visit

    def enter_module(self, name: str) -> Visit:
        self._inside.append(name)
        return self.enter(name)

    def exit_module(self, name: str) -> None:
        """Goes on with the caller of the module; not if it was not entered, since an earlier hook has raised."""
        if self._inside[-1] != name:
            return
        self._inside.pop()
        self.enter(self._inside[-1])

    def finish(self) -> None:
        """Ends the last pass."""
        self._end()
        self.running = None
        self.close()

    def on_operator(self, func: Any) -> None:
        """In the backward, begins the pass of the block whose operator runs."""
        node = _running_node()
        if node is None or node._sequence_nr() >= _ALWAYS_FIRST:
            return
        number = node._sequence_nr()
        index = max(0, bisect_right(self._nodes, number) - 1)
        if not self._backward or index < self._visit:
            self._backward, self._visit = True, index
            self.visits[index].backward = self._begin()
            self.order.append((index, True))

    def on_change(self, number: int, delta: int) -> None:
        """Raises the peak of the pass that runs."""
        if delta > 0:
            self.sizes[number] = self.num_bytes(number)
            if not self._backward:
                self.producer.setdefault(number, len(self.visits) - 1)
            if self.running is not None:
                self._raise(self.running, delta)

    def _raise(self, current: TracedPass, delta: int) -> None:
        if current.peak_after_marker_bytes is not None or (delta == self.marker_bytes and self._backward):
            without = self.current_bytes - self.marker_bytes
            current.peak_after_marker_bytes = max(current.peak_after_marker_bytes or 0, without)
        else:
            current.peak_bytes = max(current.peak_bytes, self.current_bytes)

    def _begin(self) -> TracedPass:
        self._end()
        self.running = TracedPass(self.current_bytes, self.current_bytes)
        return self.running

    def _end(self) -> None:
        if self.running is not None:
            self.running.end_bytes = self.current_bytes


@contextmanager
def trace_step(trace: StepTrace, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Follows the step that runs inside."""

    def record_saved(tensor: Tensor) -> Tensor:
        if _running_node() is None:
            trace.visits[-1].saved.append(trace.storage_number(tensor))
        return tensor

    with ExitStack() as stack:
        for name, block in blocks.items():
            for handle in _register_hooks(trace, name, block):
                stack.callback(handle.remove)
        stack.enter_context(saved_tensors_hooks(record_saved, lambda tensor: tensor))
        stack.enter_context(trace)
        trace.enter(OUTSIDE_BLOCKS)
        try:
            yield
        finally:
            trace.finish()


def _register_hooks(trace: StepTrace, name: str, block: nn.Module) -> list[Any]:
    """Hooks that begin and end the visits of a block in the forward, not where it is recomputed."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _running_node() is None:
            visit = trace.enter_module(name)
            tensors = unique_tensors((args, kwargs))
            visit.inputs = [trace.storage_number(tensor) for tensor in tensors]
            visit.input_requires_grad = [tensor.requires_grad for tensor in tensors]

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _running_node() is None:
            tensors = unique_tensors(output)
            trace.visits[-1].outputs = [trace.storage_number(tensor) for tensor in tensors]
            trace.visits[-1].output_requires_grad = any(tensor.requires_grad for tensor in tensors)
            trace.exit_module(name)

    return [
        block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        block.register_forward_hook(after, always_call=True),
    ]


def _running_node() -> Any:
    """The node of the backward that runs now; None in a forward."""
    return torch._C._current_autograd_node()


def _next_node() -> int:
    """The next sequence number of autograd; takes one."""
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert node is not None
    return int(node._sequence_nr()) + 1
