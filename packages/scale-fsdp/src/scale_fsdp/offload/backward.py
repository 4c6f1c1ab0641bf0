"""What happens to gradients during the backward pass, as each of them is there.

By default they are copied to the host, so that the step begins with what it needs. With `overlap_step=True` they are
used at once, bucket by bucket, and no gradient is left for later.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.hooks import RemovableHandle

from scale_core.autograd_hooks import after_gradient, on_arriving_grads, on_reduced_grads, once_after_backward
from scale_core.shard import title_of, unit_shard_of
from scale_core.streams import on_host, worker_for
from scale_fsdp.offload.host_kernel import PIECE_ELEMENTS
from scale_fsdp.offload.host_update import OffloadUpdate, buckets
from scale_fsdp.offload.placement import Part
from scale_fsdp.offload.transfer import EarlyCopy, still_copies

# What stands in `param.grad` when an update during the backward pass has used the gradient up.
#
# With None in its place, clipping would find a norm of zero and a second backward pass would begin a new sum, both
# without a word. This has a shape and no memory, and whoever computes with it learns what has happened.


class UsedGradient(Tensor):
    """The place of a gradient that is gone; every operation on it raises.

    Args:
        param: Whose gradient it was.
    """

    of_whom: str

    @staticmethod
    def __new__(cls, param: Tensor) -> UsedGradient:  # noqa: PYI034  # torch's maker of subclasses is untyped
        used: UsedGradient = torch.Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, storage_size=0
        )
        used.of_whom = title_of(param)
        return used

    __torch_function__ = cast(Any, torch._C)._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch calls it with the operator first
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Refuses.

        Raises:
            RuntimeError: Always.
        """
        raise used_up(next(arg.of_whom for arg in _flat((*args, *(kwargs or {}).values())) if isinstance(arg, cls)))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"UsedGradient({self.of_whom})"


def used_up(name: str) -> RuntimeError:
    """The error about a gradient that is wanted although it has been used."""
    return RuntimeError(
        f"the gradient of {name} was used for its update during the backward pass and is gone: overlap_step=True "
        "allows one backward() per step(), without clipping, gradient scaler or anything else that needs gradients "
        "between the two. Build OffloadOptimizer(..., overlap_step=False) for those"
    )


def _flat(arguments: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for argument in arguments:
        found += _flat(argument) if isinstance(argument, list | tuple) else [argument]
    return found


class EarlyCopies:
    """Gradients that go to the host as soon as they are there; the update comes in the step.

    Where somebody changes gradients after the backward pass, as clipping in place or a gradient scaler does, copies
    that were made before are of no use: from the first such step on there are none.

    Args:
        update: By whose ferries they go.
    """

    def __init__(self, update: OffloadUpdate) -> None:
        self._update = update
        self._copies: dict[Part, EarlyCopy] = {}
        self._useful = True

    def arrived(self, parts: Sequence[Part], grad: Tensor) -> None:
        """A parameter's gradient of this pass is there, or will be `param.grad` if the pass ends well."""
        if not self._useful or on_host(grad) or grad.is_sparse:
            return
        for part in parts:
            if not part.on_host:
                continue
            if part not in self._copies:
                self._copies[part] = EarlyCopy(part)
            if not self._copies[part].is_of(grad):
                self._copies[part].start(grad, self._update.ferry(grad.device))

    def take(self, parts: Sequence[Part]) -> dict[Part, Tensor]:
        """Returns the gradients of these parts that are on the host, as they are now."""
        mine = [(part, self._copies[part]) for part in parts if part in self._copies]
        valid = still_copies([(copy, part.grad) for part, copy in mine])
        if not all(valid):
            self._useful = False
            self._copies.clear()
        return {part: copy.wait() for (part, copy), is_valid in zip(mine, valid, strict=True) if is_valid}


class UpdateInBackward:
    """Updates that begin as soon as a bucket of gradients is there, and have ended when `backward()` returns.

    Args:
        update: What does them.
    """

    def __init__(self, update: OffloadUpdate) -> None:
        self._update = update
        self._pass: weakref.ref[_EndOfPass] | None = None  # Autograd alone holds it, so that it learns of a failure.
        self._cut_off = ""
        self._waiting: list[Part] = []
        self._used: dict[Tensor, None] = {}
        self._options: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._worker: Executor | None = None
        self._futures: list[Future[None]] = []

    def arrived(self, parts: Sequence[Part]) -> None:
        """A parameter's gradient of this pass is there.

        Raises:
            RuntimeError: It has had one since the last step, or an earlier pass was cut off in its updates.
        """
        param = parts[0].param
        self._refuse_after_cut()
        if param in self._used:
            raise used_up(title_of(param))
        # After a pass that failed, some may be waiting already.
        self._waiting += [part for part in parts if part.has_gradient() and part not in self._waiting]
        if self._pass is None:
            end = _EndOfPass(self)
            once_after_backward(end.come)
            self._pass = weakref.ref(end)
        if sum(part.numel for part in self._waiting) >= PIECE_ELEMENTS:
            self._begin()

    def settle(self) -> None:
        """Waits for updates that have begun, and lets go of what stands in place of gradients.

        Raises:
            RuntimeError: The options of a group have changed since, or there is a second gradient, or the pass was
                cut off in its updates.
        """
        self._refuse_after_cut()
        self.end_pass()
        used, self._used = self._used, {}
        options, self._options = self._options, {}
        for param in used:
            if isinstance(param.grad, UsedGradient):
                param.grad = None
            elif param.grad is not None:
                raise used_up(title_of(param))
        for live, then in options.values():
            for key in sorted(then.keys() | live.keys() - {"params"}):
                if not _equal(live.get(key), then.get(key)):
                    raise RuntimeError(
                        f"the option {key!r} of a parameter group was changed from {then.get(key)} to {live.get(key)} "
                        "between backward() and step(), but with overlap_step=True the update is made during the "
                        "backward pass: change options after step(), as scheduler.step() after it does"
                    )

    def forget(self) -> None:
        """Drops gradients that wait for their update, as after a backward pass that has failed."""
        self._waiting.clear()
        if self._cut_off:  # Whoever was told of it goes on with what there is.
            self.stop()

    def stop(self) -> None:
        """Waits for updates that have begun, and begins anew, as before other values are loaded."""
        self._cut_off = ""
        self._waiting.clear()
        self._used.clear()
        self._options.clear()
        wait(self._futures)
        self._futures.clear()
        self._update.join()

    def _begin(self) -> None:
        """Begins the update of what waits."""
        parts, self._waiting = [part for part in self._waiting if part.param.grad is not None], []
        for part in parts:
            self._options.setdefault(id(part.group), (part.group, _options_of(part.group)))
        on_the_host = [part for part in parts if part.on_host]
        if on_the_host and self._worker is None:
            self._worker = worker_for(on_the_host[0].param.device)
        # Whoever still needs one of these values in this pass learns at once that it is no longer there.
        increment_version({part.param for part in parts})
        with torch.no_grad():
            for bucket in buckets(on_the_host):
                assert self._worker is not None, "there is a bucket, so there is a worker"
                self._futures.append(self._worker.submit(self._update.finish, self._update.fetch(bucket, {})))
            self._update.on_device([part for part in parts if not part.on_host])
        for part in parts:
            self._used[part.param] = None
            part.param.grad = UsedGradient(part.param)

    def cut_off(self) -> None:
        """The pass that ran has failed; whoever called for it learns why from elsewhere."""
        self._pass = None
        if self._used:
            self._cut_off = title_of(next(iter(self._used)))
        for param in self._used:
            if isinstance(param.grad, UsedGradient):
                param.grad = None  # From now on the refusal below says more.

    def _refuse_after_cut(self) -> None:
        if self._cut_off:
            raise RuntimeError(
                f"a backward pass has failed after {self._cut_off} and others were updated in it (overlap_step=True), "
                "so the parameters are between two steps: load a snapshot of model and optimizer, or call "
                "optimizer.zero_grad() to go on with what there is. With overlap_step=False a pass that fails changes "
                "nothing"
            )

    def end_pass(self) -> None:
        """Updates what is left, and waits for all that has begun."""
        self._pass = None
        if self._waiting:
            self._begin()
        futures, self._futures = self._futures, []
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0]
        self._update.join()


class _EndOfPass:
    """Called by autograd when a backward pass has ended, and dropped without a call where it has failed.

    Args:
        of: Whom it tells.
    """

    def __init__(self, of: UpdateInBackward) -> None:
        self._of = weakref.ref(of)
        self._has_come = False

    def come(self) -> None:
        self._has_come = True
        of = self._of()
        if of is not None:
            of.end_pass()

    def __del__(self) -> None:
        of = self._of()
        if of is not None and not self._has_come:
            of.cut_off()


def _options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return bool(one == other)


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
