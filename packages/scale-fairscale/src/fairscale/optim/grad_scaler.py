"""`GradScaler` and `ShardedGradScaler`, with FairScale's order of arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

import scale_core
from fairscale.internal.process_group import unwrap_process_group


class GradScaler(torch.amp.GradScaler):
    """torch's scaler, on which fp16 gradients may be unscaled, too.

    Args:
        init_scale: As for torch's.
        growth_factor: As for torch's.
        backoff_factor: As for torch's.
        growth_interval: As for torch's.
        enabled: As for torch's.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        super().__init__(device, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)


class ShardedGradScaler(scale_core.ShardedGradScaler):
    """`scale_core.ShardedGradScaler`: if one rank finds inf or NaN, all skip the step.

    Args:
        init_scale: As for torch's.
        growth_factor: As for torch's.
        backoff_factor: As for torch's.
        growth_interval: As for torch's.
        enabled: As for torch's.
        process_group: The ranks that agree; None is the default group.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        group = unwrap_process_group(process_group)
        super().__init__(None, init_scale, growth_factor, backoff_factor, growth_interval, enabled, group)


__all__ = ["GradScaler", "OptState", "ShardedGradScaler"]
