"""`AdaScaleOptions`: what `AdaScale` takes beyond FairScale's arguments and the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch.amp.grad_scaler import GradScaler

from scale_core.arguments import checked_arguments


@checked_arguments(own="power")
@dataclass(frozen=True)
class AdaScaleOptions:
    """How `AdaScale` uses the gain, and measures gradients.

        >>> import torch
        >>> from scale_adascale import AdaScale, AdaScaleOptions
        >>> sgd = torch.optim.SGD(torch.nn.Linear(4, 2).parameters(), lr=0.1)
        >>> optimizer = AdaScale(sgd, num_gradients_to_accumulate=2, options=AdaScaleOptions(power=0.5))

    Attributes:
        power: Learning rates are multiplied by gain ** power. None is 0.5 for Adam and AdamW, and 1 for SGD. If a
            different optimizer divides gradients, for example RMSprop, you must give it.
        preconditioned: Measure gradients as Adam and AdamW use them, divided by the root of the mean second moment of
            their tensor. None is whether they are Adam's or AdamW's.
        grad_scaler: The scaler that multiplies losses and steps, torch's `GradScaler` or `ShardedGradScaler`.

    Raises:
        TypeError: A field has the wrong type.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """

    power: float | None = None
    preconditioned: bool | None = None
    grad_scaler: GradScaler | None = None
