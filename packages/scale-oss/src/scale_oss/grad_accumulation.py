"""Gradient accumulation that a failing backward pass can't spoil.

Accumulated gradients are in `param.grad`, as in plain PyTorch, where users may read, scale or clear them. What a
failing pass adds to a sum can't be subtracted again: not to the bit, and not at all where it was a NaN. So each sum is
set aside before the gradient of another pass is added, and merged with it when that pass has succeeded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor, nn

from scale_core.hooks.autograd import weak_hook
from scale_core.shard import on_local_tensors
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad


class GradAccumulation:
    """Accumulated gradients of one rank's parameters, around the backward pass that runs now."""

    def __init__(self, on_set_aside: Callable[[], None]) -> None:
        # Called inside the pass when a sum is set aside, so that the end of the pass is seen.
        self._on_set_aside = weak_hook(on_set_aside)
        self._watched: set[int] = set()
        self.seen: dict[int, nn.Parameter] = {}  # by id, parameters with a gradient in this pass; set by a hook
        self.sums: dict[int, tuple[nn.Parameter, Tensor]] = {}  # by id, gradients that were set aside
        self._merged: set[int] = set()  # ids whose sum is in `param.grad`, or reduced, already

    def watch(self, param: nn.Parameter) -> None:
        """From now on sets the sum of this parameter aside before the next gradient is added."""
        if id(param) not in self._watched and param.requires_grad:
            self._watched.add(id(param))
            # A hook that held its own parameter would keep it alive.
            param.register_hook(weak_hook(self._set_aside, weakref.ref(param)))

    def pop(self, param: nn.Parameter) -> Tensor | None:
        """Returns a sum for the reduction, once per pass; it is kept until `clear`."""
        if id(param) in self._merged:
            return None
        self._merged.add(id(param))
        return self.sums[id(param)][1]

    def stash(self, param: nn.Parameter, *, copied: bool) -> None:
        """Keeps the sum in `param.grad` of a parameter that got no gradient in this pass, while it is reduced.

        With `copied` it leaves a copy there, because the reduction writes into its input.
        """
        grad = unreduced_grad(param)
        assert grad is not None, "there is no sum to stash"
        self.sums[id(param)] = param, grad
        self._merged.add(id(param))
        if copied:
            set_unreduced_grad(param, grad.clone())

    def merge(self) -> None:
        """Adds the gradients of a pass without reduction, which has succeeded, to the sums."""
        with torch.no_grad():
            for key, (param, aside) in self.sums.items():
                if key not in self._merged:
                    grad = unreduced_grad(param)
                    set_unreduced_grad(param, aside if grad is None else _added(aside, grad))
        self.clear()

    def rollback(self) -> None:
        """Restores every `param.grad` as it was before the pass, which has failed."""
        for param in self.seen.values():
            set_unreduced_grad(param, None)
        for param, aside in self.sums.values():
            set_unreduced_grad(param, aside)
        self.clear()

    def clear(self) -> None:
        """Forgets the pass and the sums that were set aside: they were reduced."""
        self.seen, self.sums, self._merged = {}, {}, set()

    @on_local_tensors
    def _set_aside(self, held: weakref.ref[nn.Parameter], _: Tensor) -> None:
        param = held()
        grad = None if param is None else unreduced_grad(param)
        if param is None or grad is None or not param.requires_grad:  # Frozen since the forward, it gets none.
            return
        key = id(param)
        if key in self.sums:
            if key not in self._merged:
                # The second gradient in one pass, as of reentrant checkpoints: each is added to all before it.
                self._merged.add(key)
                with torch.no_grad():
                    set_unreduced_grad(param, _added(self.sums[key][1].clone(), grad))
        elif key not in self.seen:
            self._on_set_aside()
            self.sums[key] = param, grad
            set_unreduced_grad(param, None)


def _added(total: Tensor, grad: Tensor) -> Tensor:
    """The sum of two gradients, in the first one where that is dense."""
    if total.layout is torch.strided:
        return total.add_(grad)
    return grad + total if grad.layout is torch.strided else total + grad
