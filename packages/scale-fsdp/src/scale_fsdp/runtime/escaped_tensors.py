"""Finds units whose backward begins at a tensor that they have not returned.

A module may keep a result in an attribute, in a list or in a hook, and the loss may be of that result only. Then no
gradient arrives at an output of the unit, and nothing gathers the parameters before autograd reads them. So after the
first forward of each kind, all tensors that are alive are searched for results of a unit, and hooked. A unit that is
found so stays gathered from then on, from its forward to its backward: later passes search nothing.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from scale_core.compat import next_node_number
from scale_fsdp.runtime.unit import Unit

BeginBackward = Callable[[Unit], None]


class EscapedTensorSearch:
    """The nodes of autograd that each unit has recorded in one forward pass, by their numbers."""

    def __init__(self) -> None:
        self._running: list[tuple[Unit, int]] = []
        self._nodes: list[tuple[range, Unit]] = []  # an inner unit before the one around it

    def enter_unit(self, unit: Unit) -> None:
        """The forward of a unit begins."""
        self._running.append((unit, next_node_number()))

    def leave_unit(self, unit: Unit) -> None:
        """The forward of a unit has ended."""
        while self._running:
            innermost, first = self._running.pop()
            if innermost is unit:
                self._nodes.append((range(first, next_node_number()), unit))
                return

    def hook_tensors(self, begin_backward: BeginBackward) -> None:
        """Calls `begin_backward` with a unit that is not gathered when a gradient comes to a tensor of its forward."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in [candidate for candidate in gc.get_objects() if issubclass(type(candidate), Tensor)]:
                node = _grad_fn_of(tensor)
                if node is None:
                    continue
                number = int(node._sequence_nr())
                unit = next((unit for nodes, unit in self._nodes if number in nodes), None)
                if unit is not None:
                    node.register_prehook(_BackwardOfTensor(unit, begin_backward))


def _grad_fn_of(tensor: Tensor) -> Node | None:
    """The node of a tensor; None where torch refuses to say, so that no loss can be of it.

    That is a view made in no_grad mode, of a tensor that was written to with gradients later. Any program may have one.
    """
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


class _BackwardOfTensor:
    """The hook of one node; it must not keep the unit alive, because no garbage collector sees it."""

    def __init__(self, unit: Unit, begin_backward: BeginBackward) -> None:
        self._unit = weakref.ref(unit)
        self._begin_backward = begin_backward

    def __call__(self, grads: Sequence[Tensor | None]) -> None:
        unit = self._unit()
        if unit is not None and unit.pending_backwards > 0 and not (unit.in_backward or unit.gathered):
            self._begin_backward(unit)
