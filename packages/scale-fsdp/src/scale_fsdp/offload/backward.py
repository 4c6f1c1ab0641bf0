"""Gradient prefetch and optimizer-in-backward: the work of `OffloadOptimizer` while the backward pass runs.

By default gradients are copied to the host as they become ready, so that the step begins with its inputs on the host.
With `overlap_step=True` they are consumed, bucket by bucket, and no gradient is left for later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from scale_core.device.streams import on_host, worker_for
from scale_core.hooks.autograd import after_gradient, register_post_backward
from scale_core.hooks.gradients import register_grad_published_hook, register_reduced_grad_hook
from scale_core.shard import on_local_tensors, title_of, unit_shard_of
from scale_core.tree import tensors_in
from scale_fsdp.offload.host_kernel import CHUNK_ELEMENTS
from scale_fsdp.offload.host_update import OffloadUpdate, buckets
from scale_fsdp.offload.placement import StatePart
from scale_fsdp.offload.transfer import GradientCopy, are_current


class ConsumedGradient(Tensor):
    """Placeholder without memory in `param.grad` after an update in backward; every operation on it raises.

    With None there, `torch.nn.utils.clip_grad_norm_` would find a norm of 0 and clip nothing, without an error.
    """

    param_name: str

    @staticmethod
    def __new__(cls, param: Tensor) -> ConsumedGradient:  # noqa: PYI034  # torch's maker of subclasses is untyped
        grad: ConsumedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, storage_size=0
        )
        grad.param_name = title_of(param)
        return grad

    __torch_function__ = cast(Any, torch._C)._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the operator first
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise consumed_gradient_error(next(t.param_name for t in tensors_in((args, kwargs)) if isinstance(t, cls)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ConsumedGradient({self.param_name})"


def consumed_gradient_error(name: str) -> RuntimeError:
    """The error about a gradient that is needed after an update has consumed it."""
    return RuntimeError(
        f"the gradient of {name} was used for its update during the backward pass and is gone: overlap_step=True "
        "allows one backward() per step(), without clipping or a gradient scaler between the two. Build "
        "OffloadOptimizer(..., overlap_step=False) for those"
    )


class GradientPrefetch:
    """Copies gradients to the host as they become ready, until a step finds one changed since (clipped, unscaled)."""

    def __init__(self, update: OffloadUpdate) -> None:
        self._update = update
        self._copies: dict[StatePart, GradientCopy] = {}
        self._enabled = True

    def on_grad_ready(self, parts: Sequence[StatePart], grad: Tensor) -> None:
        """Starts to copy a gradient that is `param.grad`, or will be if the pass ends well."""
        if not self._enabled or on_host(grad) or grad.is_sparse:
            return
        for part in parts:
            if part.on_host:
                copy = self._copies.setdefault(part, GradientCopy(part))
                if not copy.is_copy_of(grad):
                    copy.start(grad, self._update.transfer_for(grad.device))

    @on_local_tensors
    def valid_copies(self, parts: Sequence[StatePart]) -> dict[StatePart, Tensor]:
        """Gradients of these parts that are on the host as they are now."""
        copies = [(part, self._copies[part]) for part in parts if part in self._copies]
        valid = are_current([(copy, part.grad) for part, copy in copies])
        if not all(valid):
            self._enabled = False
            self._copies.clear()
        return {part: copy.wait() for (part, copy), is_valid in zip(copies, valid, strict=True) if is_valid}


class OptimizerInBackward:
    """Updates that start as soon as a bucket of gradients is ready, and are complete when `backward()` returns."""

    def __init__(self, update: OffloadUpdate) -> None:
        self._update = update
        self._in_backward = False
        self._aborted_after = ""  # a parameter that was updated in a backward pass that failed
        self._pending: list[StatePart] = []
        self._updated: dict[Tensor, None] = {}
        self._options: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}  # each group, now and at its update
        self._worker: Executor | None = None
        self._futures: list[Future[None]] = []

    def on_grad_ready(self, parts: Sequence[StatePart]) -> None:
        """Queues a parameter whose gradient of this pass is in `param.grad`; starts a full bucket."""
        param = parts[0].param
        self._check_not_aborted()
        if param in self._updated:
            raise consumed_gradient_error(title_of(param))
        # Some may be queued already, by a pass that failed.
        self._pending += [part for part in parts if part.has_gradient() and part not in self._pending]
        if not self._in_backward:
            register_post_backward(self.finish_backward, self.abort)
            self._in_backward = True
        if sum(part.numel for part in self._pending) >= CHUNK_ELEMENTS:
            self._start_updates()

    @on_local_tensors
    def finish_step(self) -> None:
        """Waits for all updates and drops the placeholders of gradients."""
        self._check_not_aborted()
        self.finish_backward()
        updated, self._updated = self._updated, {}
        options, self._options = self._options, {}
        for param in updated:
            if isinstance(param.grad, ConsumedGradient):
                param.grad = None
            elif param.grad is not None:
                raise consumed_gradient_error(title_of(param))
        for now, used in options.values():
            for key in sorted(used.keys() | now.keys() - {"params"}):
                if not _values_equal(now.get(key), used.get(key)):
                    raise RuntimeError(
                        f"the option {key!r} of a parameter group was changed from {used.get(key)} to {now.get(key)} "
                        "after backward(), which updates with overlap_step=True: change options after step()"
                    )

    def discard_pending(self) -> None:
        """Drops gradients that wait for their update, as after a backward pass that failed."""
        self._pending.clear()
        if self._aborted_after:  # The user has got the error, and goes on.
            self.reset()

    def reset(self) -> None:
        """Waits for updates that have started and forgets all, as before other values are loaded."""
        self._aborted_after = ""
        self._pending.clear()
        self._updated.clear()
        self._options.clear()
        wait(self._futures)
        self._futures.clear()
        self._update.join()

    @on_local_tensors
    def _start_updates(self) -> None:
        parts, self._pending = [part for part in self._pending if part.param.grad is not None], []
        for part in parts:
            options = {k: v.clone() if isinstance(v, Tensor) else v for k, v in part.group.items() if k != "params"}
            self._options.setdefault(id(part.group), (part.group, options))
        host_parts = [part for part in parts if part.on_host]
        if host_parts and self._worker is None:
            self._worker = worker_for(host_parts[0].param.device)
        # Autograd raises where the rest of this pass still needs one of these values.
        increment_version({part.param for part in parts})
        with torch.no_grad():
            for ranges in buckets(host_parts):
                assert self._worker is not None
                self._futures.append(self._worker.submit(self._update.finish_bucket, self._update.fetch(ranges, {})))
            self._update.update_on_device([part for part in parts if not part.on_host])
        for part in parts:
            self._updated[part.param] = None
            part.param.grad = ConsumedGradient(part.param)

    @on_local_tensors
    def finish_backward(self) -> None:
        """Makes the remaining updates and waits for all updates of the pass."""
        self._in_backward = False
        if self._pending:
            self._start_updates()
        futures, self._futures = self._futures, []
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        self._update.join()

    def abort(self) -> None:
        """Records that the backward pass has failed; autograd raises its error."""
        self._in_backward = False
        if self._updated:
            self._aborted_after = title_of(next(iter(self._updated)))
        for param in self._updated:
            if isinstance(param.grad, ConsumedGradient):
                param.grad = None  # _check_not_aborted says more from now on.

    def _check_not_aborted(self) -> None:
        if self._aborted_after:
            raise RuntimeError(
                f"a backward pass has failed after {self._aborted_after} and others were updated in it "
                "(overlap_step=True), so the parameters are between two steps: load a snapshot of model and "
                "optimizer, or call optimizer.zero_grad() to go on with what there is"
            )


def _values_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


class GradReadyHooks:
    """Calls a bound method with each parameter whose gradient of this backward pass is ready, and that gradient.

    A plain parameter has a post-accumulate hook. Local shards are reported by who reduces them: twice, before their
    gradient is in `param.grad` and when it is, or only then if the method consumes gradients (`at_once`).
    """

    def __init__(self, callback: Callable[[Tensor, Tensor], None], *, at_once: bool = False) -> None:
        self._callback, self._at_once = weakref.WeakMethod(callback), at_once
        self._registered: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        self._hooked_shards = False
        weakref.finalize(callback.__self__, _remove, self._handles)  # type: ignore[attr-defined]  # a bound method

    def register(self, params: Iterable[Tensor]) -> None:
        """Adds these parameters, as far as they train and are not registered yet."""
        weak_callback, registered = self._callback, self._registered

        def on_accumulated(param: Tensor) -> None:
            callback = weak_callback()
            if callback is not None and param.grad is not None:
                callback(param, param.grad)

        def on_published(params: Sequence[Tensor]) -> None:
            for param in params:
                if param in registered:
                    on_accumulated(param)

        def on_reduced(params: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
            callback = weak_callback()
            for param, grad in zip(params, grads, strict=True):
                if callback is not None and param in registered:
                    callback(param, grad)

        for param in params:
            if param in registered or not param.requires_grad:
                continue
            registered.add(param)
            if unit_shard_of(param) is None:
                self._handles.append(after_gradient(cast(torch.nn.Parameter, param), on_accumulated))
            elif not self._hooked_shards:
                self._hooked_shards = True
                self._handles.append(register_grad_published_hook(on_published, registered if self._at_once else ()))
                if not self._at_once:
                    self._handles.append(register_reduced_grad_hook(on_reduced))


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
