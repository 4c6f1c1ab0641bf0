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


class Sums:
    """The sums of one rank, around the backward pass that runs now.

    Args:
        begins: Called when a sum is set aside, inside of the pass, so that its end is seen; and not held here.

    Attributes:
        brought: The parameters that this pass has brought a gradient to, by id; whoever sees it come enters it.
        aside: The sums that were set aside, with their parameters, by the parameters' ids.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = weakref.WeakMethod(begins)
        self._watched: set[int] = set()
        self.brought: dict[int, nn.Parameter] = {}
        self.aside: dict[int, tuple[nn.Parameter, Tensor]] = {}
        self._joined: set[int] = set()  # The sum that was set aside is in what this pass has made, too.

    def watch(self, param: nn.Parameter) -> None:
        """Sets a sum that this parameter has aside before the next gradient comes to it, from now on."""
        if id(param) not in self._watched and param.requires_grad:
            self._watched.add(id(param))
            held, its_param = weakref.ref(self), weakref.ref(param)  # A hook in a cycle would keep both alive.

            def before(_: Tensor) -> None:
                sums, param = held(), its_param()
                if sums is not None and param is not None and param.grad is not None:
                    sums._make_room(param)

            param.register_hook(before)

    def take(self, param: nn.Parameter) -> Tensor | None:
        """Returns a parameter's sum for the reduction, once in a pass; it is kept until `forget`."""
        if id(param) in self._joined:
            return None
        self._joined.add(id(param))
        return self.aside[id(param)][1]

    def lend(self, param: nn.Parameter, *, copied: bool) -> None:
        """Keeps a sum that is reduced as it stands in `param.grad`, since this pass has brought nothing to it.

        Args:
            param: Its parameter.
            copied: The reduction uses up what it is given.
        """
        assert param.grad is not None, "there is no sum to lend"
        self.aside[id(param)] = param, param.grad
        self._joined.add(id(param))
        if copied:
            param.grad = param.grad.clone()

    def join(self) -> None:
        """The pass has gone well and was not reduced: its gradients join the sums."""
        with torch.no_grad():
            for key, (param, aside) in self.aside.items():
                if key not in self._joined:
                    param.grad = aside if param.grad is None else _added(aside, param.grad)
        self.forget()

    def restore(self) -> None:
        """The pass has failed: all is as before it."""
        for param in self.brought.values():
            param.grad = None
        for param, aside in self.aside.values():
            param.grad = aside
        self.forget()

    def forget(self) -> None:
        """The sums were reduced."""
        self.brought, self.aside, self._joined = {}, {}, set()

    def _make_room(self, param: nn.Parameter) -> None:
        key = id(param)
        if key in self.aside:
            if key not in self._joined:
                # The second gradient in one pass, as of reentrant checkpoints: each is added to all before it.
                self._joined.add(key)
                with torch.no_grad():
                    assert param.grad is not None
                    param.grad = _added(self.aside[key][1].clone(), param.grad)
        elif key not in self.brought:
            begins = self._begins()
            assert param.grad is not None and begins is not None, "asked to make room for a gradient that is not there"
            begins()
            self.aside[key], param.grad = (param, param.grad), None


def _added(total: Tensor, grad: Tensor) -> Tensor:
    """The sum of two gradients, in the first one where that is dense."""
    if total.layout is torch.strided:
        return total.add_(grad)
    return grad + total if grad.layout is torch.strided else total + grad
