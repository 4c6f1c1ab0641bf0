"""A scaler that asks one rank alone is refused where gradients are divided among ranks.

torch's own `GradScaler` looks at the gradients that are here. If a shard of one rank is inf, that rank skips the step,
the others step, and from then on their weights and their scales are of different steps, without a word. Whoever calls
an optimizer's `step` is not told to anybody, so it is read off the stack.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler

from scale_core.shard import Held, shard_of


def refuse_lone_scaler(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuses a step that torch's own scaler takes on shards; a hook before the steps of optimizers.

    Raises:
        RuntimeError: It is one.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("torch.optim"):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__") != GradScaler.__module__:
        return
    scaler = frame.f_locals.get("self")
    # Whoever replaces the method that looks at the gradients, as ours and that of torch's FSDP do, has ranks agree.
    if not isinstance(scaler, GradScaler) or type(scaler)._unscale_grads_ is not GradScaler._unscale_grads_:
        return
    shards = (shard_of(param) for group in optimizer.param_groups for param in group["params"])
    for shard in shards if scaler.is_enabled() else ():
        if shard is not None and any(axis.held is Held.SHARD and axis.group.size > 1 for axis in shard.axes):
            raise RuntimeError(
                f"{type(scaler).__name__}.step({type(optimizer).__name__}): torch's scaler looks for inf and NaN in "
                f"this rank's gradients alone, and of {shard.title} other ranks have other elements: some would step "
                "and others not. Write scaler = scale_core.ShardedGradScaler(...), which has all ranks agree"
            )
