"""`DynamicLossScaler`: a loss scale that grows by rule and shrinks on overflow, as fairseq's, on one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class DynamicLossScaler:
    """Scales losses; a step with an infinite or missing number is skipped, and the scale shrinks.

    In new code: `scale_core.ShardedGradScaler`, by which all ranks decide together.

    Args:
        init_scale: The first scale.
        scale_factor: What it grows and shrinks by.
        scale_window: After how many steps without an overflow it grows.
        tolerance: The part of steps since the last change that may overflow before it shrinks.
        threshold: It shrinks no lower than this by overflows within the tolerance; None sets no limit.
        min_loss_scale: Where it would shrink below, there is an error.
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        tolerance: float = 0.0,
        threshold: float | None = None,
        min_loss_scale: float = 1e-4,
    ) -> None:
        self.loss_scale, self.scale_factor, self.scale_window = init_scale, scale_factor, scale_window
        self.tolerance, self.threshold, self.min_loss_scale = tolerance, threshold, min_loss_scale
        self._iter, self._last_overflow_iter, self._last_rescale_iter = 0, -1, -1
        self._overflows_since_rescale = 0
        self._has_overflow = False
        self._unscaled: set[int] = set()  # The ids of optimizers.

    def scale(self, outputs: Tensor) -> Tensor:
        """Returns the loss times the scale."""
        return self.loss_scale * outputs

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scale, in place, once for each optimizer before each `update`."""
        if id(optimizer) not in self._unscaled:
            for grad in _grads(optimizer):
                grad.div_(self.loss_scale)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Divides the gradients by the scale and steps, or skips the step if one is not finite.

        Raises:
            RuntimeError: A closure was given.
        """
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported: call backward() before, and step without one")
        is_finite = all(bool(torch.isfinite(grad).all()) for grad in _grads(optimizer))
        self._has_overflow |= not is_finite
        if is_finite:
            self.unscale_(optimizer)
            optimizer.step(*args, **kwargs)

    def update(self) -> None:
        """Grows the scale after `scale_window` steps without an overflow, or shrinks it on one.

        Raises:
            FloatingPointError: The scale would be less than `min_loss_scale`.
        """
        try:
            if self._has_overflow:
                self._shrink()
            elif (self._iter - self._last_overflow_iter) % self.scale_window == 0:
                self.loss_scale *= self.scale_factor
                self._last_rescale_iter = self._iter
        finally:  # So that a loop that catches the error can go on.
            self._iter += 1
            self._has_overflow = False
            self._unscaled.clear()

    def _shrink(self) -> None:
        before = self.loss_scale
        self._last_overflow_iter = self._iter
        self._overflows_since_rescale += 1
        part = self._overflows_since_rescale / max(1, self._iter - self._last_rescale_iter)
        if part >= self.tolerance:
            self.loss_scale /= self.scale_factor
            if self.threshold is not None:
                self.loss_scale = max(self.loss_scale, self.threshold)
            self._last_rescale_iter, self._overflows_since_rescale = self._iter, 0
        if self.loss_scale <= self.min_loss_scale:
            self.loss_scale = before
            raise FloatingPointError(
                f"Minimum loss scale reached ({self.min_loss_scale}): the loss is probably exploding. Lower the "
                "learning rate, clip gradients, or take a larger batch"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale."""
        return {"loss_scale": self.loss_scale}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a scale over."""
        self.loss_scale = state_dict["loss_scale"]


def _grads(optimizer: Optimizer) -> list[Tensor]:
    return [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]


__all__ = ["DynamicLossScaler"]
