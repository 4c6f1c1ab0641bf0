"""Who is told when a parameter's gradient is there, and how long."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.backward import after_gradient, on_arriving_grads, on_reduced_grads
from scale_core.shard import unit_shard_of


class GradientArrivals:
    """Calls a method with each parameter whose gradient of this backward pass is known, and with that gradient.

    A plain parameter's gradient is seen by a hook. Autograd knows of no gradient of a local shard: whoever reduces it
    tells, before the pass is over (`scale_core.on_arriving_grads`) and at its end (`scale_core.on_reduced_grads`).

    Args:
        tell: A bound method. Its object is held weakly; with it, the hooks go. Unless the gradients are used at once,
            it is called twice with a shard's: before it stands in `param.grad`, and when it does.
        at_once: It uses them up, so that they need not wait for the end of the pass: it is called once, when they stand
            in `param.grad`.
    """

    def __init__(self, tell: Callable[[Tensor, Tensor], None], *, at_once: bool = False) -> None:
        self._tell, self._at_once = weakref.WeakMethod(tell), at_once
        self._watched: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        self._hears_of_shards = False
        weakref.finalize(tell.__self__, _remove, self._handles)  # type: ignore[attr-defined]  # a bound method has one

    def watch(self, params: Iterable[Tensor]) -> None:
        """Begins with these parameters, as far as they train and are not watched yet."""
        tell, watched = self._tell, self._watched

        def arrived(param: Tensor) -> None:
            method = tell()
            if method is not None and param.grad is not None:
                method(param, param.grad)

        def reduced(params: Sequence[Tensor]) -> None:
            for param in params:
                if param in watched:
                    arrived(param)

        def arriving(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            method = tell()
            for param, grad in zip(params, grads, strict=True):
                if method is not None and param in watched:
                    method(param, grad)

        for param in params:
            if param in watched or not param.requires_grad:
                continue
            watched.add(param)
            if unit_shard_of(param) is None:
                self._handles.append(_after_gradient(param, arrived))
            elif not self._hears_of_shards:
                self._hears_of_shards = True
                self._handles.append(on_reduced_grads(reduced, watched if self._at_once else ()))
                if not self._at_once:
                    self._handles.append(on_arriving_grads(arriving))


def _after_gradient(param: Any, callback: Callable[[Tensor], None]) -> RemovableHandle:
    leaf: nn.Parameter = param  # Any leaf tensor has the hook.
    return after_gradient(leaf, callback)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
