"""Where a step's memory stands at each segment: forward by the calls of the blocks, backward by autograd's own numbers.

Autograd numbers its nodes as the forward makes them, and on one device runs them from the highest number down. So the
numbers at which blocks begin and end in the forward tell, of any operator in the backward, whose it is, and the
backward visits the segments in the reverse order of the forward. No hook stands on any tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scale_checkpoint.live_memory import LiveBytes
from scale_checkpoint.tree import tensors_in

BETWEEN = ""
"""The name of what runs outside of the blocks."""

_ALWAYS_FIRST = 2**63
"""Nodes that accumulate a gradient run as soon as they can, and are numbered from here on."""


@dataclass
class Pass:
    """What one pass through a segment took.

    Attributes:
        start_bytes: What lived when it was entered.
        peak_bytes: The most that lived while it ran.
        end_bytes: What lived when it was left.
        peak_after_sign_bytes: The most that lived, without the sign, from when a storage of the sign's size came.
    """

    start_bytes: int
    peak_bytes: int
    end_bytes: int = 0
    peak_after_sign_bytes: int | None = None


@dataclass
class Visit:
    """One visit of a block, or what runs between two visits.

    Attributes:
        name: The block's; `BETWEEN` outside of all.
        node: The number that autograd's next node had when the visit began.
        forward: What its forward took.
        backward: What its backward took; None where it has none.
        inputs: Numbers of the storages that it was given; of blocks alone.
        outputs: Numbers of the storages that it returned; of blocks alone.
        saved: Numbers of the storages that autograd saved in it, in order, where nothing else took care of them.
        wants_gradient: For each tensor that it was given, whether its gradient is asked for; of blocks alone.
        gives_gradient: Whether a result of it takes part in the backward; of blocks alone.
    """

    name: str
    node: int
    forward: Pass
    backward: Pass | None = None
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    wants_gradient: list[bool] = field(default_factory=list)
    gives_gradient: bool = False


class StepTrace(LiveBytes):
    """Follows one step over the given blocks, by visits; use with `following`.

    Attributes:
        visits: In the order of the forward; blocks and what lies between them by turns.
        order: The index of each visit whose forward or, where the second is true, whose backward began, by time.
        sizes: The bytes of every storage that was counted, by number, also after its end.
        sign_bytes: A size; see `Pass.peak_after_sign_bytes`.
        born: The visit in which each of them was made, for those of the forward.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.visits: list[Visit] = []
        self.order: list[tuple[int, bool]] = []
        self.sizes: dict[int, int] = {}
        self.born: dict[int, int] = {}
        self.sign_bytes = -1
        self._nodes: list[int] = []
        self._pass: Pass | None = None
        self._visit = -1
        self._backward = False
        self._inside = [BETWEEN]

    def enter(self, name: str) -> Visit:
        """Begins a visit of the forward."""
        self._backward = False
        visit = Visit(name, _next_node(), self._begin())
        self.visits.append(visit)
        self._nodes.append(visit.node)
        self.order.append((len(self.visits) - 1, False))
        return visit

    def go_in(self, name: str) -> Visit:
        """Begins the visit of a module."""
        self._inside.append(name)
        return self.enter(name)

    def go_out(self, name: str) -> None:
        """Comes back to what has called the module, unless it was not entered, since a hook before has raised."""
        if self._inside[-1] != name:
            return
        self._inside.pop()
        self.enter(self._inside[-1])

    @property
    def running(self) -> Pass | None:
        """The pass that has begun and not ended; None after `finish`."""
        return self._pass

    def finish(self) -> None:
        """Ends the last pass."""
        self._end()
        self._pass = None
        self.close()

    def before(self, func: Any) -> None:
        """Finds out whose operator runs, in the backward."""
        node = _running_node()
        if node is None or node._sequence_nr() >= _ALWAYS_FIRST:
            return
        number = node._sequence_nr()
        index = max(0, bisect_right(self._nodes, number) - 1)
        if not self._backward or index < self._visit:
            self._backward, self._visit = True, index
            self.visits[index].backward = self._begin()
            self.order.append((index, True))

    def changed(self, number: int, delta: int) -> None:
        """Raises the peak of the pass that runs."""
        if delta > 0:
            self.sizes[number] = self.num_bytes(number)
            if not self._backward:
                self.born.setdefault(number, len(self.visits) - 1)
            if self._pass is not None:
                self._raise(self._pass, delta)

    def _raise(self, current: Pass, delta: int) -> None:
        if current.peak_after_sign_bytes is not None or (delta == self.sign_bytes and self._backward):
            without = self.current_bytes - self.sign_bytes
            current.peak_after_sign_bytes = max(current.peak_after_sign_bytes or 0, without)
        else:
            current.peak_bytes = max(current.peak_bytes, self.current_bytes)

    def _begin(self) -> Pass:
        self._end()
        self._pass = Pass(self.current_bytes, self.current_bytes)
        return self._pass

    def _end(self) -> None:
        if self._pass is not None:
            self._pass.end_bytes = self.current_bytes


@contextmanager
def following(trace: StepTrace, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Follows the step that runs inside.

    Args:
        trace: Is filled.
        blocks: By name; of those inside others, what runs in both is the inner one's.
    """
    with ExitStack() as stack:
        for name, block in blocks.items():
            for handle in _hooked(trace, name, block):
                stack.callback(handle.remove)
        stack.enter_context(saved_tensors_hooks(_noting(trace), _same))
        stack.enter_context(trace)
        trace.enter(BETWEEN)
        try:
            yield
        finally:
            trace.finish()


def _hooked(trace: StepTrace, name: str, block: nn.Module) -> list[Any]:
    """Hooks that begin and end the visits of a block, in the forward alone: not where it is computed again."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if _running_node() is None:
            visit = trace.go_in(name)
            tensors = tensors_in((args, kwargs))
            visit.inputs = [trace.number(tensor) for tensor in tensors]
            visit.wants_gradient = [tensor.requires_grad for tensor in tensors]

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if _running_node() is None:
            tensors = tensors_in(output)
            trace.visits[-1].outputs = [trace.number(tensor) for tensor in tensors]
            trace.visits[-1].gives_gradient = any(tensor.requires_grad for tensor in tensors)
            trace.go_out(name)

    return [
        block.register_forward_pre_hook(before, with_kwargs=True, prepend=True),
        block.register_forward_hook(after, always_call=True),
    ]


def _noting(trace: StepTrace) -> Callable[[Tensor], Tensor]:
    def pack(tensor: Tensor) -> Tensor:
        if _running_node() is None:
            trace.visits[-1].saved.append(trace.number(tensor))
        return tensor

    return pack


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _running_node() -> Any:
    """The node of the backward that runs now; None in a forward."""
    return torch._C._current_autograd_node()


def _next_node() -> int:
    """The number that autograd gives next; one is used up."""
    with torch.inference_mode(False), torch.enable_grad():
        node = torch.empty(0, requires_grad=True).view(0).grad_fn
    assert node is not None
    return int(node._sequence_nr()) + 1
