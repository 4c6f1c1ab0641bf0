"""Modules that are not divided themselves, and of which something is summed: their gradients, or what they return."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scale_tp.layers.input_region import SEQUENCE_DIM
from scale_tp.layers.module_swap import Divided
from scale_tp.mappings import (
    copy_all_to_model_parallel_region,
    reduce_from_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


class SummedGradients(Divided):
    """A module whose parameters all ranks have, but with which each computes on other data: gradients are summed."""

    def extra_repr(self) -> str:
        own = super(Divided, self).extra_repr()
        return f"{own}{', ' if own else ''}gradients summed over {self.group.size} ranks"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own.

        Raises:
            ValueError: A parameter is no longer the module's own, so its gradient would not be summed.
        """
        gone = [name for name in self.placements if name not in self._parameters]
        if gone:
            raise ValueError(
                f"{type(self).__name__}: expected the parameters {', '.join(self.placements)}, whose gradients are "
                f"summed over the ranks, but {', '.join(gone)} has been taken away, as by a parametrization: "
                "parametrize no module whose gradients are summed"
            )
        names = list(self._parameters)
        params = [self._parameters[name] for name in names]
        given = [(name, param) for name, param in zip(names, params, strict=True) if param is not None]
        copied = copy_all_to_model_parallel_region(*(param for _, param in given), group=self.group)
        # What stands in the instance is found before its parameters.
        self.__dict__.update(zip((name for name, _ in given), copied, strict=True))
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name, _ in given:
                self.__dict__.pop(name, None)


class SummedOutput(Divided):
    """A module that returns a summand on each rank: a tensor, or a tuple that begins with one."""

    sequence_parallel: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, summed."""
        output = super().forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return self._sum(output)
        return (self._sum(output[0]), *output[1:])

    def _sum(self, summand: Tensor) -> Tensor:
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(summand, self.group, dim=SEQUENCE_DIM)
        return reduce_from_model_parallel_region(summand, self.group)
