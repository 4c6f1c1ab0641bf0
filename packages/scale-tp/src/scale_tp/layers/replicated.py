"""Modules with full parameters whose gradients, or outputs, are all-reduced."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from scale_tp.comm import copy_many_to_region, reduce_from_region, reduce_scatter_sequence
from scale_tp.layers.linear_ops import SEQUENCE_DIM
from scale_tp.layers.module_swap import ShardedMixin


class GradAllReduceMixin(ShardedMixin):
    """A module whose parameters all ranks have, but which each computes on other data: gradients are summed."""

    def extra_repr(self) -> str:
        repr_of_class = super(ShardedMixin, self).extra_repr()
        return f"{repr_of_class}{', ' if repr_of_class else ''}gradients summed over {self.group.size} ranks"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with copies of its parameters whose gradients are summed in one message."""
        missing_names = [name for name in self.shardings if name not in self._parameters]
        if missing_names:
            raise ValueError(
                f"{type(self).__name__}: {', '.join(missing_names)} has been taken away, as by a parametrization: "
                "parametrize no module whose gradients are summed over the ranks"
            )
        named_params = [(name, param) for name, param in self._parameters.items() if param is not None]
        copies = copy_many_to_region([param for _, param in named_params], self.group)
        # Attributes of the instance are found before its parameters.
        self.__dict__.update(zip((name for name, _ in named_params), copies, strict=True))
        try:
            return super().forward(*args, **kwargs)
        finally:
            for name, _ in named_params:
                self.__dict__.pop(name, None)


class OutputAllReduceMixin(ShardedMixin):
    """A module that returns a summand on each rank: a tensor, or a tuple that begins with one."""

    sequence_parallel: bool

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, summed over the ranks."""
        output = super().forward(*args, **kwargs)
        if isinstance(output, Tensor):
            return self._reduce(output)
        return (self._reduce(output[0]), *output[1:])

    def _reduce(self, summand: Tensor) -> Tensor:
        if self.sequence_parallel:
            return reduce_scatter_sequence(summand, self.group, SEQUENCE_DIM)
        return reduce_from_region(summand, self.group)
