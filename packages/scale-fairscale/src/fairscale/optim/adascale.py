"""`AdaScale` and `AdaScaleWrapper`: FairScale's arguments on scale-adascale's optimizer."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.optim import SGD, Optimizer

import scale_adascale


class AdaScale(scale_adascale.AdaScale):
    """An optimizer around another one, which multiplies its learning rates by the gain of the large batch.

    In new code: `scale_adascale.AdaScale(optimizer)`.

    Args:
        optimizer: As in FairScale.
        world_size: As in FairScale.
        scale: As in FairScale.
        smoothing: As in FairScale.
        num_gradients_to_accumulate: As in FairScale.
        is_scaled_loss: As in FairScale.
        debias_ewma: As in FairScale.

    Raises:
        RuntimeError: One rank, and one gradient in a step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        is_scaled_loss: bool = True,
        debias_ewma: bool = True,
    ) -> None:
        ranks = world_size if world_size is not None else (dist.get_world_size() if dist.is_initialized() else 1)
        if ranks * num_gradients_to_accumulate == 1:
            raise RuntimeError(
                "AdaScale does not support a single worker without grad accumulation: give "
                "num_gradients_to_accumulate=2, or use scale_adascale.AdaScale, which compares successive steps there"
            )
        super().__init__(
            optimizer, world_size, scale, smoothing, num_gradients_to_accumulate, is_scaled_loss, debias_ewma
        )

    @property
    def _smoothing(self) -> float:
        return self.smoothing


class AdaScaleWrapper(AdaScale):
    """An `AdaScale` that makes its inner optimizer.

    Args:
        params: For the inner optimizer.
        world_size: As for `AdaScale`.
        scale: As for `AdaScale`.
        smoothing: As for `AdaScale`.
        num_gradients_to_accumulate: As for `AdaScale`.
        debias_ewma: As for `AdaScale`; FairScale took it for `is_scaled_loss`.
        optim_cls: The class of the inner optimizer.
        **additional_optim_args: Its arguments.
    """

    def __init__(
        self,
        params: Any,
        world_size: int | None = None,
        scale: float | None = None,
        smoothing: float | None = None,
        num_gradients_to_accumulate: int = 1,
        debias_ewma: bool = True,
        optim_cls: type[Optimizer] = SGD,
        **additional_optim_args: Any,
    ) -> None:
        inner = optim_cls(params, **additional_optim_args)
        super().__init__(inner, world_size, scale, smoothing, num_gradients_to_accumulate, debias_ewma=debias_ewma)


__all__ = ["AdaScale", "AdaScaleWrapper"]
