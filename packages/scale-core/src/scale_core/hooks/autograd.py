"""Hooks of a backward pass: before a module's backward, after it, per gradient, and at its end.

Autograd calls nothing when it enters or leaves a module, so the hooks are put on tensors: on a module's outputs (before
its backward), on its inputs (after it), on a parameter, and on the engine for the end. `PendingForwards` says to which
forward passes no backward has come. `gradients` has the hooks around the reduction of gradients.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle, unserializable_hook

from scale_core.compat import graph_task_id, next_node_number, queue_callback
from scale_core.tree import map_tensors, tensors_in

_OWN_HOOK = "_scale_hook"  # the attribute of hooks of `after_gradient`
_open_tasks: Counter[int] = Counter()  # autograd's numbers of the passes whose end is waited for


class _Identity(torch.autograd.Function):
    """The same values as a new tensor that is not a view and has hooks of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def alias_outputs(outputs: Any) -> Any:
    """Returns outputs whose hooks see the caller's gradients alone, before the backward of anything in the module.

    A view that is changed in place takes its history from its base and loses its hooks; a tensor that an inner module
    has returned already has hooks of that. Tensors computed after all outputs and kept elsewhere, as a penalty on
    weights in an attribute, would run its backward before theirs, since autograd goes back in order.
    """
    in_order = are_newest_nodes(tensors_in(outputs))

    def own(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or (in_order and not (tensor._is_view() or tensor._backward_hooks)):
            return tensor
        identity: Tensor = _Identity.apply(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return identity

    return map_tensors(own, outputs)


def are_newest_nodes(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd has recorded no operation on this thread since these tensors were computed."""
    newest = next_node_number() - 1  # Autograd goes back from the newest operation to the oldest.
    numbers = (int(tensor.grad_fn._sequence_nr()) for tensor in tensors if tensor.grad_fn is not None)
    return max(numbers, default=newest) >= newest


def before_backward(outputs: Any, callback: Callable[[], None]) -> bool:
    """Calls `callback` whenever a gradient arrives at one of the tensors in `outputs`; returns whether one can."""
    watched = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    for tensor in watched:
        tensor.register_hook(_ignoring_the_gradient(callback))
    return bool(watched)


def after_backward(inputs: Any, callback: Callable[[], None]) -> tuple[Any, bool]:
    """Calls `callback` once the gradients of all tensors in `inputs` have been computed.

    The module must compute with the returned aliases: a hook on an input itself would wait for every other use of that
    tensor. If the module's first operation on an input is in place, autograd takes the alias out of the graph, and we
    don't wait for its gradient. Without a different input, `callback` is not called. Returns the inputs, and whether
    one of them needs a gradient.
    """
    aliases: list[Tensor] = []

    def alias(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        # A differentiable view: an in-place operation on it is seen, with its history, through the input.
        aliases.append(tensor.view_as(tensor))
        return aliases[-1]

    inputs = map_tensors(alias, inputs)
    if len(aliases) == 1:
        aliases[0].register_hook(_ignoring_the_gradient(callback))
    elif aliases:
        register_multi_grad_hook(aliases, lambda _: callback(), mode="all")
    return inputs, bool(aliases)


def after_gradient(param: nn.Parameter, callback: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls `callback` with the parameter as soon as its gradient of this pass is in `param.grad`."""
    vars(callback)[_OWN_HOOK] = True
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(callback)
    return handle


def is_own_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook on a parameter is one of `after_gradient`, and none of the user's."""
    return hasattr(hook, _OWN_HOOK)


def register_post_backward(finish: Callable[[], None], fail: Callable[[], None]) -> None:
    """Calls `finish` at the end of the backward pass that runs now, or `fail` where the pass fails.

    Autograd has no hook for a failed pass, but it drops the callbacks for its end before the error reaches the user.
    Errors of `fail` itself are suppressed: the user is about to see the error of the pass.

    On an accelerator, a thread of autograd's own may be the last that drops them, while the user has the error already
    and goes on. A `fail` that talks to other ranks leaves that to the next pass `in_autograds_thread`.
    """
    queue_callback(_EndOfBackward(finish, fail))


def in_autograds_thread() -> bool:
    """Whether the caller runs in a thread that C++ has started, as those in which autograd computes on accelerators."""
    return isinstance(threading.current_thread(), threading._DummyThread)


def in_backward() -> bool:
    """Whether the caller runs inside a backward pass, as the recomputation of a checkpointed module does."""
    return graph_task_id() != -1


def is_nested() -> bool:
    """Whether the backward pass that runs now is inside of another one, whose end `register_post_backward` waits for.

    The pass of a reentrant checkpoint is: it ends before the pass around it has averaged gradients.
    """
    task = graph_task_id()
    return any(other != task for other in _open_tasks)


class _EndOfBackward:
    """A callback that autograd calls at the end of a backward pass, and drops uncalled when the pass fails."""

    def __init__(self, finish: Callable[[], None], fail: Callable[[], None]) -> None:
        self._finish = finish
        self._fail: Callable[[], None] | None = fail
        self._task = graph_task_id()
        _open_tasks[self._task] += 1

    def __call__(self) -> None:
        self._fail = None
        self._close()
        self._finish()

    def __del__(self) -> None:
        if self._fail is not None:
            self._close()
            with suppress(Exception):
                self._fail()

    def _close(self) -> None:
        _open_tasks[self._task] -= 1
        if not _open_tasks[self._task]:
            del _open_tasks[self._task]


def weak_hook(method: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """A hook that calls a method with `args` and its own arguments, or returns None when the method's object is gone.

    A tensor, or this module, holds hooks for as long as it lives itself; they must not keep an optimizer alive.
    """
    held = weakref.WeakMethod(method)
    return lambda *given: None if (alive := held()) is None else alive(*args, *given)


def _ignoring_the_gradient(callback: Callable[[], None]) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        callback()

    unserializable_hook(hook)  # Who saves the tensor is not warned of it.
    return hook


# A backward that this rank skips, as where its loss failed or a batch was skipped, leaves the others waiting in theirs.


class _Forward:
    """A forward pass, held by its graph alone: it goes when that is freed."""


class PendingForwards:
    """Forward passes of this rank to which no backward has come since the ranks last agreed.

    A skipped backward is seen when the outputs of its forward are gone, or when the next forward begins.
    """

    def __init__(self, on_backward: Callable[[], None]) -> None:
        self._on_backward, self._on_grads = weak_hook(on_backward), weak_hook(self._match)
        self._unmatched: list[weakref.ref[_Forward]] = []  # in the order of the calls
        self._num_matched = 0
        self._per_pass = 1  # forwards that the last backward pass has reached
        self._accepted = 0  # unmatched forwards on every rank, for example if their outputs are only looked at

    def watch(self, outputs: Any, *, counts: bool = True) -> None:
        """Hooks the graph of a forward pass, whose backward all ranks must run if it `counts`."""
        # A view that is changed in place gets another grad_fn; its base keeps its own.
        roots = [tensor._base if tensor._base is not None else tensor for tensor in tensors_in(outputs)]
        nodes = {root.grad_fn for root in roots if root.grad_fn is not None}
        if nodes:
            forward = _Forward()
            if counts:
                self._unmatched.append(weakref.ref(forward))
            for node in nodes:
                node.register_prehook(partial(self._on_grads, forward))

    def _match(self, forward: _Forward, _: tuple[Tensor | None, ...]) -> None:
        """A backward has reached the outputs of a forward."""
        before = len(self._unmatched)
        self._unmatched = [ref for ref in self._unmatched if ref() is not forward]
        self._num_matched += before - len(self._unmatched)
        self._on_backward()

    def has_skipped(self, *, in_step: bool) -> bool:
        """Whether this rank has skipped a backward pass, as far as it can tell now.

        Where another forward begins on all ranks together (`in_step`), a graph that is still alive counts as well, if a
        backward has always come before this point.
        """
        if self.num_unmatched <= self._accepted:
            return False
        is_freed = any(ref() is None for ref in self._unmatched)
        return is_freed or (in_step and self.num_unmatched >= self._per_pass + self._accepted)

    @property
    def num_unmatched(self) -> int:
        return len(self._unmatched)

    def drop_skipped(self) -> None:
        """Forgets the forwards of one skipped pass, which was aborted."""
        del self._unmatched[: self._per_pass]

    def accept_baseline(self) -> None:
        """Takes the present number of unmatched forwards for normal: all ranks have skipped as many."""
        self._accepted = self.num_unmatched

    def reset_baseline(self) -> None:
        """After a pass that succeeded: forgets matched and freed forwards; others may still get their backward."""
        self._accepted = min(self._accepted, self.num_unmatched)
        self._per_pass, self._num_matched = self._num_matched or self._per_pass, 0
        self._unmatched = [ref for ref in self._unmatched if ref() is not None]

    def clear(self) -> None:
        """Forgets all forwards: the pass has failed."""
        self._unmatched, self._num_matched = [], 0
