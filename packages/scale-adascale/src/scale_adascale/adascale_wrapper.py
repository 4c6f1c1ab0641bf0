"""`AdaScaleWrapper`: FairScale's other way to build an `AdaScale`, with the class of the inner optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import SGD, Optimizer

from scale_adascale.adascale import OPTIONS, AdaScale
from scale_adascale.options import AdaScaleOptions
from scale_core.arguments import checked_arguments
from scale_core.comm.group import GroupLike
from scale_core.errors import renamed_arguments


class AdaScaleWrapper(AdaScale):
    """An `AdaScale` around an optimizer that it builds from parameters.

        >>> import torch
        >>> from scale_adascale import AdaScaleWrapper
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = AdaScaleWrapper(model.parameters(), num_gradients_to_accumulate=4, lr=0.1, momentum=0.9)
        >>> optimizer.scale
        4.0

    Args:
        params: The parameters, or groups of them, for the optimizer.
        optim_cls: The class of the optimizer.
        **additional_optim_args: For the optimizer. Other arguments, and errors, are the same as for `AdaScale`.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """

    @checked_arguments(own="scale smoothing num_gradients_to_accumulate")
    @renamed_arguments(**OPTIONS)
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
        options: AdaScaleOptions | None = None,
        **additional_optim_args: Any,
    ) -> None:
        super().__init__(
            optim_cls(params, **additional_optim_args),
            world_size,
            scale,
            smoothing,
            num_gradients_to_accumulate,
            is_scaled_loss,
            debias_ewma,
            process_group,
            model_parallel_group=model_parallel_group,
            options=options,
        )
