"""Copies from one device to another, which autograd brings back the same way."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from scale_core.nested import map_tensors
from scale_core.streams import on_host

T = TypeVar("T")


def copied_to(device: torch.device, tree: T) -> T:
    """Returns `tree` with its tensors on `device`; those that are there already are themselves.

    A copy to the host is waited for. Between accelerators nothing is: the copy has its place in the order of both
    devices' current streams. It is made by who will use it, in the thread that computes on `device`, so that autograd
    finds its way back in the right order.
    """
    host = torch.device("cpu")

    def move(tensor: Tensor) -> Tensor:
        if tensor.device == device:
            return tensor
        return tensor.to(device, non_blocking=device != host and not on_host(tensor))

    moved: T = map_tensors(move, tree)
    return moved
