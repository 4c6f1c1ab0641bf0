"""The norm of gradients on one process, and values on another device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.tree import map_tensors


def calc_grad_norm(parameters: Sequence[nn.Parameter], p: float) -> Tensor:
    """Returns the p-norm of all gradients on this rank, scalar, computed in fp32."""
    params = list(parameters)
    grads = [param.grad.detach() for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    return torch.nn.utils.get_total_norm([grad.float() for grad in grads], float(p)).to(params[0].dtype)


def recursive_copy_to_device(value: Any, non_blocking: bool, device: torch.device) -> Any:
    """Returns a value with each tensor in it on a device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=non_blocking), value)


__all__ = ["calc_grad_norm", "recursive_copy_to_device"]
