"""`OSS`: FairScale's arguments on scale-oss's optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import SGD, Optimizer

import scale_oss
from fairscale._warnings import warn_argument


class OSS(scale_oss.OSS):
    """Optimizer state sharding, as FairScale's class of this name.

    In new code: `scale_oss.OSS(params, optim, process_group=..., lr=...)`.

    Args:
        params: As in FairScale.
        optim: As in FairScale.
        group: The ranks, `process_group` in new code.
        broadcast_buffer_size: Without effect, as there.
        broadcast_fp16: As in FairScale; may be set later.
        force_broadcast_object: Without effect.
        **default: Arguments of `optim`.
    """

    def __init__(
        self,
        params: Any,
        optim: type[Optimizer] = SGD,
        group: Any = None,
        broadcast_buffer_size: int = -1,
        broadcast_fp16: bool = False,
        force_broadcast_object: bool = False,
        **default: Any,
    ) -> None:
        if group is not None:
            name = optim.__name__
            warn_argument(
                "OSS", "group", f"is process_group in new code: scale_oss.OSS(params, {name}, process_group=group)"
            )
        if broadcast_buffer_size != -1:
            warn_argument(
                "OSS", "broadcast_buffer_size", "has no effect, leave it out: scale_oss.OSS(bucket_numel=...)"
            )
        if force_broadcast_object:
            warn_argument("OSS", "force_broadcast_object", "has no effect, leave it out: state is sent as tensors")
        super().__init__(params, optim, process_group=group, broadcast_fp16=broadcast_fp16, **default)

    def clip_grad_norm(self, max_norm: float, norm_type: float = 2.0, filter_params_fn: Any = None) -> torch.Tensor:
        """Clips by the norm over all ranks; `clip_grad_norm_` in new code."""
        return self.clip_grad_norm_(max_norm, norm_type, filter_params_fn)

    def refresh_trainable(self) -> None:
        """Takes FairScale's call, which is not needed: what trains is looked up in every step."""

    def _clear_cache(self) -> None:
        """Takes what trainers call; nothing is cached."""


__all__ = ["OSS"]
