"""When things happen in a backward pass.

Autograd calls nobody when it enters or leaves a module. These are the four places where it can be made to: a tensor's
gradient arrives (the module's outputs: before its backward; its inputs: after it), a parameter's gradient is whole,
and the whole pass has ended. Beside them stand `on_local_grads`, by which others see what a rank computed by itself
before it is averaged away; `on_arriving_grads`, by which they see what it was averaged into while the pass still runs;
and `on_reduced_grads`, by which they learn when that stands in `param.grad`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from scale_core import compat
from scale_core.tree import map_tensors, tensors_in

LocalGradsCallback = Callable[[Sequence[Tensor], Sequence[Tensor]], None]

ArrivingGradsCallback = Callable[[Sequence[Tensor], Sequence[Tensor]], None]

ReducedGradsCallback = Callable[[Sequence[Tensor]], None]

_local_grads_callbacks: OrderedDict[int, LocalGradsCallback] = OrderedDict()  # a handle can't refer weakly to a dict
_arriving_grads_callbacks: OrderedDict[int, ArrivingGradsCallback] = OrderedDict()
_reduced_grads_callbacks: OrderedDict[int, tuple[ReducedGradsCallback, Container[Tensor]]] = OrderedDict()
_reported: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Identity(torch.autograd.Function):
    """The same values as a tensor of its own: not a view, and with hooks of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def own_outputs(outputs: Any) -> Any:
    """Returns outputs through which only the caller's gradients arrive, whatever is done to them afterwards, and first.

    A view that is changed in place takes its history from its base, and loses the hooks it has; a tensor that
    somebody inside has returned already carries his. What was computed after all outputs and kept elsewhere, as a
    penalty on weights in an attribute, has its backward before theirs, since autograd goes back in order.
    """
    in_order = compat.is_newest(tensors_in(outputs))

    def own(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad or (in_order and not (tensor._is_view() or tensor._backward_hooks)):
            return tensor
        identity: Tensor = _Identity.apply(tensor)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return identity

    return map_tensors(own, outputs)


def before_backward(outputs: Any, callback: Callable[[], None]) -> bool:
    """Calls `callback` whenever a gradient arrives at one of the tensors in `outputs`.

    Returns:
        Whether there was a tensor through which a gradient can arrive.
    """
    watched = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    for tensor in watched:
        tensor.register_hook(_ignoring_the_gradient(callback))
    return bool(watched)


def after_backward(inputs: Any, callback: Callable[[], None]) -> tuple[Any, bool]:
    """Calls `callback` once the gradients of all tensors in `inputs` have been computed.

    The module must compute with what is returned: its own aliases of the inputs. A hook on an input itself would
    wait for everybody else who uses that tensor. Where the module's first operation on an input is in place, autograd
    takes the alias out of the graph, and its gradient is not waited for: with no other input, nobody calls.

    Returns:
        The inputs, and whether there was a tensor that needs a gradient.
    """
    aliases: list[Tensor] = []

    def alias(tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        # A differentiable view: an in-place operation on it is seen, with its history, by whoever holds the input.
        aliases.append(tensor.view_as(tensor))
        return aliases[-1]

    inputs = map_tensors(alias, inputs)
    if len(aliases) == 1:
        aliases[0].register_hook(_ignoring_the_gradient(callback))
    elif aliases:
        register_multi_grad_hook(aliases, lambda _: callback(), mode="all")
    return inputs, bool(aliases)


def after_gradient(param: nn.Parameter, callback: Callable[[Tensor], None]) -> RemovableHandle:
    """Calls `callback` with the parameter as soon as its gradient of this pass stands in `param.grad`."""
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(callback)
    return handle


def once_after_backward(callback: Callable[[], None]) -> None:
    """Calls `callback` at the very end of the backward pass that is running now.

    Raises:
        RuntimeError: No backward pass is running.
    """
    compat.queue_after_backward(callback)


def at_end_of_backward(finish: Callable[[], None], fail: Callable[[], None]) -> None:
    """Calls `finish` at the very end of the backward pass that is running now, or `fail` where it does not come so far.

    Autograd calls nobody when a backward pass fails. But it drops what was to be called at its end, before the error
    reaches the user. What `fail` itself raises nobody sees: the user is about to see the error of the pass.

    Raises:
        RuntimeError: No backward pass is running.
    """
    once_after_backward(_EndOfBackward(finish, fail))


def in_backward() -> bool:
    """Whether the caller runs inside a backward pass, as the recomputation of a checkpointed module does."""
    return compat.in_backward()


def on_local_grads(callback: LocalGradsCallback) -> RemovableHandle:
    """Calls `callback(params, grads)` with gradients as this rank computed them, before they are reduced.

    Each backward pass is told of by itself: where gradients of several passes are added up before they are reduced, as
    under `no_sync()` of scale-fsdp, each one is that of its pass alone. scale-oss tells of the sum, when it is reduced:
    its parameters are whole, so that a hook on them sees each pass.

    Args:
        callback: Gets the parameters as `parameters()` yields them and, in the same order, the whole local gradient
            of each, in the full shape (see `full_shape`) and possibly in a lower precision than the parameter. The
            gradients are borrowed: they must not be changed, nor kept after the callback returns.

    Returns:
        A handle; `handle.remove()` ends the calls.
    """
    handle = RemovableHandle(_local_grads_callbacks)
    _local_grads_callbacks[handle.id] = callback
    return handle


def mark_reported(params: Sequence[Tensor]) -> None:
    """Records that no gradient comes to these parameters by itself: `report_local_grads` tells of all they get."""
    for param in params:
        _reported[param] = None


def are_local_grads_reported(param: Tensor) -> bool:
    """Whether a hook on this parameter would never be called, and `on_local_grads` tells of its gradients."""
    return param in _reported


def local_grads_wanted() -> bool:
    """Whether anybody has asked for local gradients."""
    return bool(_local_grads_callbacks)


def report_local_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Hands a unit's local gradients to everybody who asked by `on_local_grads`."""
    with torch.no_grad():
        for callback in list(_local_grads_callbacks.values()):
            callback(params, grads)


def on_arriving_grads(callback: ArrivingGradsCallback) -> RemovableHandle:
    """Calls `callback(params, grads)` when gradients of local shards are reduced, while the pass of other modules runs.

    They stand aside until the pass has ended well on every rank, and are dropped where it has not. Then they are what
    `param.grad` becomes: that very tensor, unless another one comes to it, as a late gradient of this pass.

    Args:
        callback: Gets local shards as `parameters()` yields them, none of which has a gradient of an earlier pass, and
            what each got in this one, in its shape. It may read the gradients, or start to copy them; not change them.

    Returns:
        A handle; `handle.remove()` ends the calls.
    """
    handle = RemovableHandle(_arriving_grads_callbacks)
    _arriving_grads_callbacks[handle.id] = callback
    return handle


def report_arriving_grads(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
    """Hands a unit's reduced gradients to everybody who asked by `on_arriving_grads`."""
    with torch.no_grad():
        for callback in list(_arriving_grads_callbacks.values()):
            callback(params, grads)


def on_reduced_grads(callback: ReducedGradsCallback, at_once: Container[Tensor] = ()) -> RemovableHandle:
    """Calls `callback(params)` when the gradients of these local shards stand in `param.grad`, whole for this pass.

    No hook of autograd tells of it: a shard's gradient comes from the other ranks. It is summed up, added to the
    gradient of earlier passes, and its reduction waited for. That is so when the pass has ended well on every rank.

    Args:
        callback: Gets local shards as `parameters()` yields them. It may take a gradient away, by `param.grad = None`.
        at_once: Local shards whose gradients the callback uses up, so that they need not wait for the end of the pass:
            they are put into `param.grad`, and it is called, as soon as they are reduced. Where the pass fails later,
            that can't be taken back. May grow afterwards.

    Returns:
        A handle; `handle.remove()` ends the calls.
    """
    handle = RemovableHandle(_reduced_grads_callbacks)
    _reduced_grads_callbacks[handle.id] = callback, at_once
    return handle


def used_at_once(param: Tensor) -> bool:
    """Whether somebody uses this shard's gradient up before the pass is over (see `on_reduced_grads`)."""
    return any(param in at_once for _, at_once in _reduced_grads_callbacks.values())


def arriving_grads_wanted() -> bool:
    """Whether anybody has asked for gradients before the pass is over."""
    return bool(_arriving_grads_callbacks) or any(at_once for _, at_once in _reduced_grads_callbacks.values())


def reduced_grads_wanted() -> bool:
    """Whether anybody has asked for reduced gradients."""
    return bool(_reduced_grads_callbacks)


def report_reduced_grads(params: Sequence[Tensor]) -> None:
    """Tells everybody who asked by `on_reduced_grads` that nothing more comes to these gradients in this pass.

    Called inside the backward pass, once per pass and parameter, by whoever has reduced them.
    """
    with torch.no_grad():
        for callback, _ in list(_reduced_grads_callbacks.values()):
            callback(params)


class _EndOfBackward:
    """Called by autograd when a backward pass has ended, and dropped without a call where it has failed."""

    def __init__(self, finish: Callable[[], None], fail: Callable[[], None]) -> None:
        self._finish = finish
        self._fail: Callable[[], None] | None = fail

    def __call__(self) -> None:
        self._fail = None
        self._finish()

    def __del__(self) -> None:
        if self._fail is not None:
            with suppress(Exception):
                self._fail()


def _ignoring_the_gradient(callback: Callable[[], None]) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        callback()

    return hook
