"""Who is told when a parameter's gradient is there, and how long."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.backward import after_gradient, on_reduced_grads
from scale_core.shard import shard_of


class GradientArrivals:
    """Calls a method with each parameter whose gradient of this backward pass is whole.

    A plain parameter's gradient is seen by a hook. Autograd knows of no gradient of a local shard: whoever reduces it
    tells (`scale_core.on_reduced_grads`).

    Args:
        tell: A bound method. Its object is held weakly; with it, the hooks go.
    """

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        self._tell = weakref.WeakMethod(tell)
        self._watched: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        self._hears_of_shards = False
        weakref.finalize(tell.__self__, _remove, self._handles)  # type: ignore[attr-defined]  # a bound method has one

    def watch(self, params: Iterable[Tensor]) -> None:
        """Begins with these parameters, as far as they train and are not watched yet."""
        tell, watched = self._tell, self._watched

        def arrived(param: Tensor) -> None:
            method = tell()
            if method is not None:
                method(param)

        def reduced(params: Sequence[Tensor]) -> None:
            for param in params:
                if param in watched:
                    arrived(param)

        for param in params:
            if param in watched or not param.requires_grad:
                continue
            watched.add(param)
            if shard_of(param) is None:
                self._handles.append(_after_gradient(param, arrived))
            elif not self._hears_of_shards:
                self._hears_of_shards = True
                self._handles.append(on_reduced_grads(reduced))


def _after_gradient(param: Any, callback: Callable[[Tensor], None]) -> RemovableHandle:
    leaf: nn.Parameter = param  # Any leaf tensor has the hook.
    return after_gradient(leaf, callback)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
