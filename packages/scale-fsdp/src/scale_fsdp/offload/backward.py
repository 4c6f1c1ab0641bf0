"""What happens to gradients during the backward pass, as each of them is there.

By default they are copied to the host, so that the step begins with what it needs. With `overlap_step=True` they are
used at once, bucket by bucket, and no gradient is left for later.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from scale_core.backward import once_after_backward
from scale_core.shard import title_of
from scale_core.streams import on_host, worker_for
from scale_fsdp.offload.copies import EarlyCopy, still_copies
from scale_fsdp.offload.host_step import PIECE_ELEMENTS
from scale_fsdp.offload.parts import Part
from scale_fsdp.offload.update import OffloadUpdate, buckets
from scale_fsdp.offload.used_gradient import UsedGradient, used_up


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
