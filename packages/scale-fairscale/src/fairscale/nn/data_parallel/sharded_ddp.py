"""`ShardedDataParallel`: FairScale's arguments and texts on scale-oss's wrapper."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.optim import Optimizer

import scale_oss
from fairscale._warnings import warn_argument
from fairscale.internal.process_group import unwrap_process_group
from fairscale.optim.oss import OSS

_WITHOUT_EFFECT = {
    "reduce_buffer_size": (2**23, "the size of a bucket is scale_oss.OSSOptions(bucket_numel=...)"),
    "auto_refresh_trainable": (True, "what trains is looked up in every pass"),
    "warn_on_trainable_params_changed": (True, "what trains may change without a warning"),
}


class NothingToReduceError(AssertionError, RuntimeError):
    """`reduce()` found nothing; an AssertionError as in FairScale."""


class DeviceChangedError(AssertionError, RuntimeError):
    """The model was moved or converted after its optimizer was built; an AssertionError as in FairScale."""


class ShardedDataParallel(scale_oss.ShardedDataParallel):
    """Data parallelism for a model whose optimizer is an `OSS`, as FairScale's class of this name.

    In new code: `scale_oss.ShardedDataParallel(model, optimizer)`.

    Args:
        module: As in FairScale.
        sharded_optimizer: As in FairScale.
        process_group: As in FairScale; the optimizers' own.
        broadcast_buffers: As in FairScale.
        sync_models_at_startup: As in FairScale.
        reduce_buffer_size: Without effect.
        auto_refresh_trainable: Without effect.
        reduce_fp16: As in FairScale, whatever the size of buckets.
        warn_on_trainable_params_changed: Without effect.
    """

    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: Optimizer | Sequence[Optimizer],
        process_group: Any = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = True,
    ) -> None:
        arguments = locals()
        for name, (default, now) in _WITHOUT_EFFECT.items():
            if arguments[name] not in (default, 0):  # 0 asks for no buckets of its own.
                warn_argument("ShardedDataParallel", name, f"has no effect, leave it out: {now}")
        super().__init__(
            module,
            sharded_optimizer,
            unwrap_process_group(process_group),
            broadcast_buffers=broadcast_buffers,
            sync_module_states=sync_models_at_startup,
            reduce_fp16=reduce_fp16,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module.

        Raises:
            RuntimeError: A gradient that is there requires a gradient itself.
        """
        if torch.is_grad_enabled() and self.training:
            for name, param in self.module.named_parameters():
                if param.grad is not None and param.grad.requires_grad:
                    raise RuntimeError(
                        "ShardedDataParallel only works with gradients that don't require grad, got one of "
                        f"'{name}': call backward() without create_graph=True, or model.zero_grad() before the pass"
                    )
        return super().forward(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        if self._changes_dtypes_alone(fn):
            # As in FairScale, for an evaluation in half precision, say: the next step checks that they are back.
            self.wait()
            nn.Module._apply(self, fn, recurse)
            return self
        try:
            return super()._apply(fn, recurse)
        except RuntimeError as error:
            if "the optimizer holds parameters" not in str(error):
                raise
            raise DeviceChangedError(
                f"Changing devices is not supported, because this would break OSSs state: {error}"
            ) from error

    def _changes_dtypes_alone(self, fn: Callable[..., Any]) -> bool:
        probes = [bucket.full.new_empty(0) for bucket in self._buckets]
        converted = [fn(probe) for probe in probes]
        pairs = list(zip(probes, converted, strict=True))
        return all(old.device == new.device for old, new in pairs) and any(old.dtype != new.dtype for old, new in pairs)

    def refresh_trainable(self) -> None:
        """Takes FairScale's call, which is not needed: each forward pass looks up what trains."""

    def sync_buffers(self, blocking: bool = False) -> None:
        """Has all ranks take rank 0's buffers, which have arrived when this returns."""
        super().sync_buffers()

    def reduce(self) -> None:
        """Reduces what passes under `no_sync()` have left.

        Raises:
            AssertionError: There is nothing to reduce; a RuntimeError, too.
        """
        try:
            super().reduce()
        except RuntimeError as error:
            if "no gradient waits" not in str(error):
                raise
            raise NothingToReduceError(
                "No grads waiting to be reduced, maybe that this was called twice or there was no BW pass ?"
            ) from error


__all__ = ["OSS", "ShardedDataParallel"]
