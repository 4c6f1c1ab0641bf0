"""What a scaler has multiplied the loss by, found by who calls `step`.

By then gradients are unscaled again, but what was measured of them during the backward pass is not. Nobody is told who
calls an optimizer's `step`, nor by what a loss was multiplied, so the scaler is read off the stack. Others may stand
between: libraries put functions of their own in the place of `optimizer.step`, to learn whether it was called.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType

from torch.amp.grad_scaler import GradScaler

_STEPS = ("step", "_maybe_opt_step")  # A scaler that steps is in one of these, whatever it calls.


def scaler_of_step() -> weakref.ref[GradScaler] | None:
    """Returns the scaler that has called the optimizer's step, if one has that is enabled; the innermost one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _STEPS:
            scaler = frame.f_locals.get("self")
            if isinstance(scaler, GradScaler):
                return weakref.ref(scaler) if scaler.is_enabled() else None
        frame = frame.f_back
    return None


def scale_of(reference: weakref.ref[GradScaler] | None) -> float:
    """Returns what a scaler multiplies losses by until its next `update`; 1 where there is none."""
    scaler = None if reference is None else reference()
    return 1.0 if scaler is None else float(scaler.get_scale())
