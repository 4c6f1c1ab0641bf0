"""Error feedback: the rounding error of one step's message is added to the next one.

So an error is late and not lost (Seide et al., 2014; Karimireddy et al., arXiv 1901.09847). A step that is aborted
leaves the error as it was: the additions of a pass count only from `commit` on, and where a loss is scaled only until a
scaler says, by `on_scaler_update`, that the step was skipped.

A gradient scaler changes the unit of gradients. Errors are therefore kept divided by the scale of their pass: scales
are powers of two as a rule, so that this changes no bit of them.
"""

from __future__ import annotations

from weakref import ref

import torch
from torch import Tensor

_loss_scale: ref[Tensor] | None = None


def set_loss_scale(scale: Tensor | None) -> None:
    """Sets the factor of losses, []: from a scaler's `scale` to its `update`, which sets None."""
    global _loss_scale
    _loss_scale = None if scale is None else ref(scale)


def loss_scale() -> Tensor | None:
    """Returns the present factor of losses, []; None where they are not scaled, or the scaler is gone."""
    return None if _loss_scale is None else _loss_scale()


class ErrorFeedback:
    """The error that one rank has made in messages of one size, fp32, in the shape of their values."""

    def __init__(self) -> None:
        self.error: Tensor | None = None  # of the passes that have succeeded, for gradients that are not scaled
        self._next: Tensor | None = None  # of the pass that runs
        self._before: Tensor | None = None  # before the passes since the last update of a scaler
        self._has_passes = False  # There are such passes.
        self._scale: ref[Tensor] | None = None  # of the last of them

    def add_to(self, values: Tensor) -> Tensor:
        """Returns values of a floating-point dtype plus the error that waits, in fp32; may change them in place."""
        wide = values.float()
        error = self.error if self._next is None else self._next
        if error is None:
            return wide
        scale = loss_scale()
        if scale is None:
            return wide.add_(error.view(wide.shape))
        return wide.addcmul_(error.view(wide.shape), scale.to(wide.device))

    def keep(self, values: Tensor, sent: Tensor) -> None:
        """Keeps the difference of `values` and `sent`, which this may change; nothing where either is not finite."""
        error = torch.sub(values, sent, out=sent)
        scale = loss_scale()
        if scale is not None:
            error.div_(scale.to(error.device))
        self._next = error.nan_to_num_(0.0, 0.0, 0.0)

    def commit(self) -> None:
        """The pass has succeeded."""
        if self._next is None:
            return
        if loss_scale() is not None and (not self._has_passes or self._scale is None):
            self._before = self.error
        self._has_passes, self._scale = True, _loss_scale
        self.error, self._next = self._next, None

    def rollback(self) -> None:
        """The pass has failed."""
        self._next = None

    def was_scaled_by(self, scale: Tensor) -> bool:
        """Whether the passes of this step, if there were any, had their losses multiplied by this very scale."""
        return not self._has_passes or (self._scale is not None and self._scale() is scale)

    def on_scaler_update(self, *, skipped: bool) -> None:
        """The optimizer has stepped, or has skipped the step: then the error is as before the passes of this step."""
        if self._has_passes and skipped:
            self.error = self._before
        self._before, self._has_passes = None, False

    def load(self, error: Tensor | None) -> None:
        """Takes this error in the place of the present one."""
        self.rollback()
        self.on_scaler_update(skipped=False)
        self.error = error
