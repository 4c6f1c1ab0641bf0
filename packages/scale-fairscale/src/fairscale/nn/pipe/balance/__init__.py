"""Balances by time and by memory, from `scale_pipe`. Begin with `balance_by_time`, below."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import scale_pipe
from fairscale._warnings import warn_argument
from fairscale.nn.pipe.balance import blockpartition
from scale_core import Group

__all__ = ["balance_by_size", "balance_by_time", "blockpartition"]

Device = torch.device | str | int | None


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float | None = None, device: Device = None
) -> list[int]:
    """Balances the times of forward and backward, as `scale_pipe.balance_by_time` does.

    Args:
        partitions: The number of partitions.
        module: The layers.
        sample: One micro-batch, on any device.
        timeout: Wall clock to spend, in seconds; 1 if it is None.
        device: Where to measure; None for the module's device, which was the current CUDA device.

    Returns:
        The number of layers of each partition.

    Raises:
        ValueError: A parameter has a gradient already; or as `scale_pipe.balance_by_time` says.
    """
    if timeout is not None:
        warn_argument(
            "balance_by_time",
            "timeout",
            f"is written seconds: from scale_pipe import balance_by_time; "
            f"balance_by_time({partitions}, module, sample, seconds={timeout!r})",
        )
    if any(param.grad is not None for param in module.parameters()):
        raise ValueError("some parameter already has gradient: module.zero_grad() before it is measured")
    seconds = 1.0 if timeout is None else timeout
    alone = Group()  # FairScale's pipelines run in one process, and ranks beside it need not call this.
    return scale_pipe.balance_by_time(partitions, module, sample, seconds=seconds, device=device, process_group=alone)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[int]:
    """Balances memory, as `scale_pipe.balance_by_size` does, on the CPU as well.

    Args:
        partitions: The number of partitions.
        module: The layers.
        input: A mini-batch.
        chunks: The number of micro-batches it is cut into.
        param_scale: Copies of a parameter in all, with its gradient and the optimizer's state.
        device: Where to measure; None for the module's device, which was the current CUDA device.

    Returns:
        The number of layers of each partition.

    Raises:
        ValueError: As `scale_pipe.balance_by_size` says.
    """
    return scale_pipe.balance_by_size(partitions, module, input, chunks=chunks, param_scale=param_scale, device=device)
