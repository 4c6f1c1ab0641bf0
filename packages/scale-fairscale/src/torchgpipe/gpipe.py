"""`GPipe`: the alias of `scale_pipe.Pipe` with torchgpipe's errors."""

from __future__ import annotations

from torch import nn

from fairscale.nn.pipe.pipe import BalanceError, Pipe
from fairscale.nn.pipe.pipe import verify_module as _verify_module

__all__ = ["BalanceError", "GPipe", "verify_module"]


def verify_module(module: nn.Sequential) -> None:
    """Checks that a module is an `nn.Sequential` of different layers that share no parameter.

    Raises:
        TypeError: It is none.
        ValueError: A layer is in it twice, or two layers share a parameter.
    """
    _verify_module(module)
    holders: dict[int, str] = {}
    for name, layer in module.named_children():
        for param in layer.parameters():
            if holders.setdefault(id(param), name) != name:
                raise ValueError(
                    "module with duplicate parameters in distinct children is not supported: layers "
                    f"{holders[id(param)]!r} and {name!r} share one; scale_pipe.Pipe takes them where both are on one "
                    "device"
                )


class GPipe(Pipe):
    """A pipeline of layers on several devices of one process: `scale_pipe.Pipe`, which has the arguments."""

    _balance_module = "torchgpipe.balance"

    def _verify(self, module: nn.Sequential) -> None:
        verify_module(module)
