"""Gradients that add up over several backward passes, and outlive one that fails.

They stand in `param.grad`, as in plain PyTorch, where anybody may look at them, scale or clear them. But what a failing
pass has added to a sum could not be taken out of it again: not to the bit, and not at all where a NaN was added. So a
sum is set aside before the gradient of another pass comes to it, and the two meet when that pass has gone well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn


class GradAccumulation:
    """The accumulation of one rank, around the backward pass that runs now.

    Args:
        on_set_aside: Called when a sum is set aside, inside of the pass, so that its end is seen; and not held here.

    Attributes:
        brought: The parameters that this pass has brought a gradient to, by id; whoever sees it come enters it.
        aside: The accumulation that were set aside, with their parameters, by the parameters' ids.
    """

    def __init__(self, on_set_aside: Callable[[], None]) -> None:
        self._on_set_aside = weakref.WeakMethod(on_set_aside)
        self._watched: set[int] = set()
        self.seen: dict[int, nn.Parameter] = {}
        self.sums: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._merged: set[int] = set()  # The sum that was set aside is in what this pass has made, too.

    def watch(self, param: nn.Parameter) -> None:
        """Sets a sum that this parameter has aside before the next gradient comes to it, from now on."""
        if id(param) not in self._watched and param.requires_grad:
            self._watched.add(id(param))
            held, its_param = weakref.ref(self), weakref.ref(param)  # A hook in a cycle would keep both alive.

            def before(_: Tensor) -> None:
                accumulation, param = held(), its_param()
                if accumulation is not None and param is not None and param.grad is not None:
                    accumulation._set_aside(param)

            param.register_hook(before)

    def pop(self, param: nn.Parameter) -> Tensor | None:
        """Returns a parameter's sum for the reduction, once in a pass; it is kept until `forget`."""
        if id(param) in self._merged:
            return None
        self._merged.add(id(param))
        return self.sums[id(param)][1]

    def lend(self, param: nn.Parameter, *, copied: bool) -> None:
        """Keeps a sum that is reduced as it stands in `param.grad`, since this pass has brought nothing to it.

        Args:
            param: Its parameter.
            copied: The reduction uses up what it is given.
        """
        assert param.grad is not None, "there is no sum to lend"
        self.sums[id(param)] = param, param.grad
        self._merged.add(id(param))
        if copied:
            param.grad = param.grad.clone()

    def merge(self) -> None:
        """The pass has gone well and was not reduced: its gradients join the accumulation."""
        with torch.no_grad():
            for key, (param, aside) in self.sums.items():
                if key not in self._merged:
                    param.grad = aside if param.grad is None else _added(aside, param.grad)
        self.clear()

    def rollback(self) -> None:
        """The pass has failed: all is as before it."""
        for param in self.seen.values():
            param.grad = None
        for param, aside in self.sums.values():
            param.grad = aside
        self.clear()

    def clear(self) -> None:
        """The accumulation were reduced."""
        self.seen, self.sums, self._merged = {}, {}, set()

    def _set_aside(self, param: nn.Parameter) -> None:
        key = id(param)
        if key in self.sums:
            if key not in self._merged:
                # The second gradient in one pass, as of reentrant checkpoints: each is added to all before it.
                self._merged.add(key)
                with torch.no_grad():
                    assert param.grad is not None
                    param.grad = _added(self.sums[key][1].clone(), param.grad)
        elif key not in self.seen:
            on_set_aside = self._on_set_aside()
            assert param.grad is not None and on_set_aside is not None, (
                "asked to make room for a gradient that is not there"
            )
            on_set_aside()
            self.sums[key], param.grad = (param, param.grad), None


def _added(total: Tensor, grad: Tensor) -> Tensor:
    """The sum of two gradients, in the first one where that is dense."""
    if total.layout is torch.strided:
        return total.add_(grad)
    return grad + total if grad.layout is torch.strided else total + grad
