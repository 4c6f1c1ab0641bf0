"""One worker that accumulates nothing: one gradient per step, of which alone nobody knows how noisy it is.

So the gradients of successive steps are compared. They are those of other weights, so what the weights have moved in
between counts as noise; and the last gradient is kept, as large as the parameters. The other way out is `halves`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from scale_adascale.gain import Moments, moments_of_two
from scale_adascale.measuring import Compared


class Successive:
    """The gradient of the last step, and what it says beside that of this one."""

    def __init__(self) -> None:
        self._last: list[Tensor | None] | None = None
        self._new: list[Tensor | None] = []
        self._were_trained: list[bool] = []  # in the last step
        self._are_trained: list[bool] = []

    @property
    def has_last(self) -> bool:
        """Whether there was a step to compare with."""
        return self._last is not None

    def take(self, holders: Sequence[Tensor], trained: Sequence[bool]) -> tuple[list[Tensor | None], frozenset[int]]:
        """Keeps a copy of the gradients that a pass has brought; returns those of the step before it, or none.

        Args:
            holders: What has the gradients of the k parameters.
            trained: Which of these are not frozen.

        Returns:
            The gradients of the step before, and the numbers of what has a gradient in one step alone, since it is
            frozen or was: it is not compared.
        """
        self._new = [None if holder.grad is None else holder.grad.detach().clone() for holder in holders]
        self._are_trained = list(trained)
        if self._last is None:
            return [None] * len(holders), frozenset()
        pairs = enumerate(zip(self._were_trained, trained, strict=True))
        return self._last, frozenset(number for number, (was, now) in pairs if not (was and now))

    def moments(self, measured: Compared, scale: float, loss_scale: float) -> list[Moments | None]:
        """Returns the moments of each group, or None where there was no step before.

        Args:
            measured: Of both gradients, the older one without the scale of its loss.
            scale: Of one batch.
            loss_scale: What the loss of the new one was multiplied by.
        """
        if self._last is None:
            return [None] * len(measured.product)
        return [
            moments_of_two(last, new / loss_scale**2, product / loss_scale, scale)
            for product, last, new in zip(*measured, strict=True)
        ]

    def keep(self, loss_scale: float) -> None:
        """The step was taken: the next one is compared with it."""
        self._last, self._new, self._were_trained = self._new, [], self._are_trained
        if loss_scale != 1.0:
            torch._foreach_div_([grad for grad in self._last if grad is not None], loss_scale)

    def forget(self) -> None:
        """Compares the next gradient with nothing."""
        self._last = None
