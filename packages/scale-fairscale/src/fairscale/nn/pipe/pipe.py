"""`Pipe`: `scale_pipe.Pipe` with FairScale's names of parameters, kinds of inputs and errors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

import scale_pipe
from fairscale.nn.pipe.batchnorm import DeferredBatchNorm
from fairscale.nn.pipe.microbatch import TensorOrTensors, check
from scale_pipe.partition.partition import check_balance, check_sequential

__all__ = ["BalanceError", "Pipe", "verify_module"]


class BalanceError(ValueError):
    """A balance that does not fit the module."""


def verify_module(module: nn.Sequential) -> None:
    """Checks that a module is an `nn.Sequential` of different layers.

    Raises:
        TypeError: It is none.
        ValueError: A layer is in it twice.
    """
    check_sequential(module)


class Pipe(scale_pipe.Pipe):
    """A pipeline of layers on several devices of one process: `scale_pipe.Pipe`, which has the arguments.

    As in FairScale, parameters are named by their partition (`partitions.0.1.weight`), layers are no attributes of the
    pipeline, the input is one tensor or a tuple of them, and so is the output.

    Raises:
        BalanceError: The balance does not fit the module, or is missing.
    """

    _batch_norm_class = DeferredBatchNorm
    _balance_module = "fairscale.nn.pipe.balance"  # Where errors say that a balance can be had.

    def __init__(
        self,
        module: nn.Sequential,
        balance: Iterable[int] | None = None,
        *,
        devices: Iterable[torch.device | str | int] | None = None,
        chunks: int = 1,
        checkpoint: Any = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        self._verify(module)
        num_chunks = int(chunks) if isinstance(chunks, float) and int(chunks) == chunks else chunks
        super().__init__(
            module,
            self._balance(balance, len(module)),
            devices=devices,
            chunks=num_chunks,
            checkpoint=str(checkpoint),  # type: ignore[arg-type]  # An object that says one of them was taken, too.
            deferred_batch_norm=deferred_batch_norm,
        )
        self._modules.clear()  # The layers by their own names.
        self.partitions = self.__dict__.pop("partitions")

    def _verify(self, module: nn.Sequential) -> None:
        verify_module(module)

    def _balance(self, balance: Iterable[int] | None, num_layers: int) -> list[int]:
        try:
            return check_balance(balance, num_layers)
        except ValueError as error:
            reason = str(error).replace("from scale_pipe import", f"from {self._balance_module} import")
            raise BalanceError(reason) from None

    def forward(self, input: TensorOrTensors) -> TensorOrTensors:
        """Computes the output of a mini-batch: a tensor [N, ...], or a tuple of them.

        Raises:
            TypeError: The input or the output is something else.
        """
        check(input)
        output: Any = super().forward(input)
        check(output)
        result: Tensor | tuple[Tensor, ...] = output
        return result

    def _check_layers(self) -> None:
        """Layers have no second name, so one that is replaced in its partition is what runs."""
