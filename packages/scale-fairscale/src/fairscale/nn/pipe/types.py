"""Types that FairScale's pipelines took."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fairscale.nn.pipe.microbatch import TensorOrTensors, Tensors

__all__ = ["LazyModule", "TensorOrTensors", "Tensors"]


class LazyModule:
    """A function that makes a module, called where the module is needed.

    Args:
        function: Without arguments.
    """

    def __init__(self, function: Callable[[], nn.Module]) -> None:
        self.function = function

    def __call__(self) -> nn.Module:
        return self.function()
