"""How much memory a rank holds, and how much it would hold without sharding."""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core.shard import full_shape


def peak_bytes(device: torch.device) -> int:
    """The most memory that this rank had at one time.

    On CUDA what tensors took; on CPU the whole process, of which Python and torch themselves are some 300 MB.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def held_bytes(params: Iterable[Tensor], optimizer: Optimizer) -> int:
    """Parameters, gradients and optimizer state that this rank holds between two steps."""
    total = 0
    for param in params:
        total += _bytes(param)
        total += 0 if param.grad is None else _bytes(param.grad)
        total += sum(_bytes(value) for value in optimizer.state.get(param, {}).values() if isinstance(value, Tensor))
    return total


def replicated_bytes(params: Iterable[Tensor], optimizer: Optimizer) -> int:
    """The same, if this rank held every parameter whole, as DDP does."""
    total = 0
    for param in params:
        numel = full_shape(param).numel()
        state = optimizer.state.get(param, {}).values()
        # What has the parameter's own shape grows with it; the rest (a step count) does not.
        alike = sum(value.element_size() for value in state if isinstance(value, Tensor) and value.shape == param.shape)
        rest = sum(_bytes(value) for value in state if isinstance(value, Tensor) and value.shape != param.shape)
        total += numel * (2 * param.element_size() + alike) + rest
    return total


def in_words(num_bytes: float) -> str:
    """Bytes in decimal units, two or three digits: 3.4 MB."""
    for unit in ("B", "kB", "MB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} GB"


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
