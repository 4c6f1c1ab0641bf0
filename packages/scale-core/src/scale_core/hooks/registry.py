"""The gradient hooks of this process, by event, in the order of registration."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch.utils.hooks import RemovableHandle


class Hooks(OrderedDict[int, Any]):
    """The hooks of one event."""

    # A subclass, because `RemovableHandle` needs a weak reference, and a plain dict has none.

    def register(self, hook: Any) -> RemovableHandle:
        """Adds a hook, until its handle removes it."""
        handle = RemovableHandle(self)
        self[handle.id] = hook
        return handle


class GradientHooks:
    """The hooks of all events."""

    def __init__(self) -> None:
        self.local = Hooks()  # gradients as this rank has computed them, before they are reduced
        self.reduced = Hooks()  # reduced gradients of shards, before the backward pass is over
        self.published = Hooks()  # gradients of shards in `param.grad`; hooks may consume them
        self.by_source = Hooks()  # gradients of the samples of one rank
        self.microbatch_steps = Hooks()  # steps that report the gradients of each micro-batch


gradient_hooks = GradientHooks()
