"""`AdaScaleWrapper`: the optimizer and AdaScale around it in one call, for what builds optimizers from a class."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Optimizer

from scale_adascale.adascale import AdaScale
from scale_core.group import GroupLike


class AdaScaleWrapper(AdaScale):
    """An `AdaScale` around an optimizer that it builds from parameters.

        >>> import torch
        >>> from scale_adascale import AdaScaleWrapper
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdaScaleWrapper(model.parameters(), num_gradients_to_accumulate=4, lr=0.1, momentum=0.9)
        >>> optimizer.scale
        4.0

    Args:
        params: For the optimizer.
        world_size: As in `AdaScale`, and so are those below up to `debias_ewma`.
        scale: As there.
        smoothing: As there.
        num_gradients_to_accumulate: As there.
        debias_ewma: As there.
        optim_cls: The class of the optimizer.
        is_scaled_loss: As in `AdaScale`, and so are those below.
        process_group: As there.
        model_parallel_group: As there.
        power: As there.
        preconditioned: As there.
        **additional_optim_args: For the optimizer.

    Raises:
        TypeError: As in `AdaScale`.
        ValueError: As in `AdaScale`.
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
        *,
        is_scaled_loss: bool = True,
        process_group: GroupLike = None,
        model_parallel_group: GroupLike = None,
        power: float | None = None,
        preconditioned: bool | None = None,
        **additional_optim_args: Any,
    ) -> None:
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size=world_size,
            scale=scale,
            smoothing=smoothing,
            num_gradients_to_accumulate=num_gradients_to_accumulate,
            is_scaled_loss=is_scaled_loss,
            debias_ewma=debias_ewma,
            process_group=process_group,
            model_parallel_group=model_parallel_group,
            power=power,
            preconditioned=preconditioned,
        )
