"""Clipping that waits for the step: what gradients are to be multiplied by, and that they are still the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from scale_core import compat
from scale_core.norms import check_max_norm, clip_factor, grad_norm


class PendingClipping:
    """The factor by which the next update multiplies its gradients."""

    def __init__(self) -> None:
        self._factor = 1.0
        self._marks: list[tuple[TensorWeakRef, int] | None] | None = None

    def measure(self, params: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Takes the norm of all gradients, and keeps what clipping multiplies them by; returns the norm.

        Where none of those that were measured before is there any more, as after `model.zero_grad()`, these are new.

        Raises:
            RuntimeError: They were measured before, and have changed since.
            TransferError: As `scale_core.grad_norm`.
            ValueError: As `scale_core.grad_norm`; or `max_norm` is below 0, or not a number.
        """
        check_max_norm(max_norm)
        if self._marks is not None and not self._is_any_there(params):
            self.forget()
        before = self.factor(params)
        norm = grad_norm(params, norm_type) * before
        (factor,) = compat.values_of(clip_factor(norm, max_norm).reshape(1), simulated=[0.5])
        self._factor = factor * before
        self._marks = [None if grad is None else (TensorWeakRef(grad), grad._version) for grad in _grads(params)]
        return norm

    def factor(self, params: Sequence[Tensor]) -> float:
        """What gradients are to be multiplied by.

        Raises:
            RuntimeError: They are others than those whose norm was taken.
        """
        if all(grad is None for grad in _grads(params)):
            return 1.0  # They were thrown away, and there is nothing to multiply.
        for grad, mark in zip(_grads(params), self._marks or [], strict=self._marks is not None):
            if (grad is None) != (mark is None) or (mark and (mark[0]() is not grad or grad._version != mark[1])):
                raise RuntimeError(
                    "gradients have changed since OffloadOptimizer.clip_grad_norm_ has measured them: call it last, "
                    "after all backward passes and after scaler.unscale_(optimizer), right before step(); where those "
                    "that it has measured were thrown away, say so by optimizer.zero_grad(), or measure the new ones"
                )
        return self._factor

    def _is_any_there(self, params: Iterable[Tensor]) -> bool:
        """Whether one of the gradients that were measured is one still, changed or not."""
        marks = zip(_grads(params), self._marks or [], strict=True)
        return any(grad is not None and mark is not None and mark[0]() is grad for grad, mark in marks)

    def forget(self) -> None:
        """The gradients were used, or are gone."""
        self._factor, self._marks = 1.0, None


def _grads(params: Iterable[Tensor]) -> list[Tensor | None]:
    return [param.grad for param in params]
