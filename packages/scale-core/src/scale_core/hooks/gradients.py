"""Hooks for gradients around their reduction, called by the package that reduces them.

`register_local_grad_hook` has the gradients of this rank before they are averaged, `register_reduced_grad_hook` the
average while the pass still runs, and `register_grad_published_hook` is called when the average is in `param.grad`.
A step without hooks asks only whether `gradient_hooks` has some.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from scale_core.arguments import checked_arguments
from scale_core.records import ParamRecord
from scale_core.shard import as_local

GradsHook = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # given parameters and, in the same order, gradients
GradPublishedHook = Callable[[Sequence[Tensor]], None]


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
"""The hooks of this process, in the order of registration."""


@checked_arguments
def register_local_grad_hook(callback: GradsHook) -> RemovableHandle:
    """Calls `callback(params, grads)` with gradients as this rank computed them, before they are reduced.

    It is called once per backward pass. If gradients of several passes add up, for example under `no_sync()` of
    scale-fsdp, each call has the gradients of its pass only. scale-oss calls it with the sum, at the
    reduction: its parameters are unsharded, so a hook on a parameter sees each pass.

    It gets the parameters as `parameters()` yields them and, in the same order, their full local gradients. A gradient
    has the full shape (see `full_shape`), and may have a lower precision than its parameter. The gradients are
    borrowed: they must not be changed, nor kept after the callback returns. `handle.remove()` ends the calls.

    Examples:
        >>> from scale_core.hooks.gradients import register_local_grad_hook
        >>> norms = []
        >>> handle = register_local_grad_hook(lambda params, grads: norms.append(sum(grad.norm() for grad in grads)))
        >>> # backward passes of sharded models now call it, on each rank with its gradients
        ... handle.remove()

    See also: [the core](../how-the-core-works.md).
    """
    return gradient_hooks.local.register(callback)


def mark_without_autograd_hooks(params: Sequence[Tensor]) -> None:
    """Records that autograd gives these parameters no gradients: only `call_local_grad_hooks` reports them."""
    for param in params:
        ParamRecord.get_or_create(param).lacks_autograd_hooks = True


def lacks_autograd_hooks(param: Tensor) -> bool:
    """Whether a hook of autograd on this parameter would never be called."""
    record = ParamRecord.get(param)
    return record is not None and record.lacks_autograd_hooks


def has_local_grad_hooks() -> bool:
    """Whether there are hooks for local gradients."""
    return bool(gradient_hooks.local)


def call_local_grad_hooks(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Calls the hooks of `register_local_grad_hook` with a unit's local gradients."""
    with torch.no_grad():
        for callback in list(gradient_hooks.local.values()):
            callback(params, grads)


@checked_arguments
def register_reduced_grad_hook(callback: GradsHook) -> RemovableHandle:
    """Calls `callback(params, grads)` when gradients of local shards are reduced, while the pass of other modules runs.

    The gradients become `param.grad` when the pass has succeeded on every rank, and are dropped otherwise: the very
    same tensors, unless a late gradient of this pass replaces one.

    It gets local shards as `parameters()` yields them, without gradients of an earlier pass, and the gradient that each
    got in this one, in its shape. It may read the gradients, or start to copy them; not change them.

    Examples:
        >>> from scale_core.hooks.gradients import register_reduced_grad_hook
        >>> handle = register_reduced_grad_hook(lambda params, grads: print(f"{len(params)} reduced"))
        >>> # backward passes of sharded models now call it
        ... handle.remove()

    See also: [the core](../how-the-core-works.md).
    """
    return gradient_hooks.reduced.register(callback)


def call_reduced_grad_hooks(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Calls the hooks of `register_reduced_grad_hook` with a unit's reduced gradients."""
    with torch.no_grad():
        for callback in list(gradient_hooks.reduced.values()):
            callback(params, grads)


@checked_arguments
def register_grad_published_hook(callback: GradPublishedHook, at_once: Container[Tensor] = ()) -> RemovableHandle:
    """Calls `callback(params)` when the gradients of these local shards are in `param.grad`, complete for this pass.

    No hook of autograd can do that: a shard's gradient comes from the other ranks. It is reduced, added to the gradient
    of earlier passes, and published when the pass has succeeded on every rank.

    Args:
        callback: Gets local shards as `parameters()` yields them. It may take a gradient away, by `param.grad = None`.
        at_once: Local shards whose gradients the callback consumes. As soon as such a gradient is reduced, we put it
            into `param.grad` and call the callback, before the end of the pass. Where the pass fails later, that can't
            be taken back. May grow afterwards.

    Examples:
        >>> from scale_core.hooks.gradients import register_grad_published_hook
        >>> handle = register_grad_published_hook(lambda params: print(f"{len(params)} gradients"))
        >>> # backward passes of sharded models now call it
        ... handle.remove()

    See also: [the core](../how-the-core-works.md).
    """
    return gradient_hooks.published.register((callback, at_once))


def is_consumed_in_backward(param: Tensor) -> bool:
    """Whether a hook of `register_grad_published_hook` consumes this shard's gradient before the pass is over."""
    return any(param in at_once for _, at_once in gradient_hooks.published.values())


def has_reduced_grad_hooks() -> bool:
    """Whether there are hooks for gradients before the pass is over."""
    return bool(gradient_hooks.reduced) or any(at_once for _, at_once in gradient_hooks.published.values())


def call_grad_published_hooks(params: Sequence[Tensor]) -> None:
    """Calls the hooks of `register_grad_published_hook`, once per pass and parameter, inside the backward pass."""
    with torch.no_grad():
        for callback, _ in list(gradient_hooks.published.values()):
            callback(params)


def call_post_accumulate_grad_hooks(params: Iterable[Tensor]) -> bool:
    """Calls hooks that users have put on local shards by `register_post_accumulate_grad_hook`; autograd does not.

    Each is called once per pass that reduces, when the shard has its reduced gradient, as in FSDP2. Returns whether any
    was called.
    """
    with as_local():
        hooks_by_param = [
            (param, list(hooks.values()))
            for param in params
            if (hooks := param._post_accumulate_grad_hooks) and param.requires_grad and param.grad is not None
        ]
    with torch.no_grad():
        for param, param_hooks in hooks_by_param:
            for hook in param_hooks:
                hook(param)
    return bool(hooks_by_param)
