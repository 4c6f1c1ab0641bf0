"""Copies of layers, to be measured."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from scale_pipe.partition.profile import training_copy

__all__ = ["layerwise_sandbox"]


def layerwise_sandbox(module: nn.Sequential, device: torch.device) -> Iterator[nn.Module]:
    """Yields a copy of each layer on a device, in training mode; the module does not change."""
    return (training_copy(layer, device) for layer in module)
