"""`Adam`, which was a CUDA extension with reduced precision: torch's fused one, where the precision is full."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import torch

from fairscale._warnings import refuse, warn_argument


class Precision(enum.Enum):
    """What FairScale's `Adam` kept in which dtype."""

    FULL_PRECISION = enum.auto()
    MIXED_PRECISION = enum.auto()
    MEMORY_EFFICIENT_MIXED_PRECISION = enum.auto()
    PURE_FP16 = enum.auto()


class Adam(torch.optim.Adam):
    """torch's Adam, fused into one kernel where torch can.

    Args:
        params: As for torch's.
        lr: As for torch's.
        bias_correction: Must be True.
        betas: As for torch's.
        eps: As for torch's.
        eps_inside_sqrt: Must be False.
        weight_decay: As for torch's.
        max_grad_norm: Without effect, as in FairScale.
        amsgrad: Must be False.
        precision: `Precision.FULL_PRECISION`, or None, which is the precision of the parameters.

    Raises:
        RuntimeError: `amsgrad`.
        NotImplementedError: An argument that torch's Adam does not have.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        precision: Precision | None = None,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant: write torch.optim.Adam(amsgrad=True)")
        if not bias_correction or eps_inside_sqrt:
            refuse(
                f"Adam({bias_correction=}, {eps_inside_sqrt=})",
                "torch's Adam has neither switch",
                "an optimizer of your own with these formulas",
            )
        if precision not in (None, Precision.FULL_PRECISION):
            refuse(
                f"Adam({precision=})",
                "it was a CUDA kernel of FairScale's, and state in fp16 loses small updates",
                "fp32 parameters and FullyShardedDataParallel(mixed_precision=True), whose shards are the fp32 master "
                "weights, or OSS",
            )
        if max_grad_norm:
            warn_argument(
                "Adam", "max_grad_norm", "has no effect: write torch.nn.utils.clip_grad_norm_(params, max_norm)"
            )
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)


__all__ = ["Adam", "Precision"]
