"""Measures the rounding of a program: by how much each of its tensors changes where nothing changes but rounding.

The program runs again with weights that are one unit of the last place larger or smaller, at random. What differs then
is what the rounding of one operation becomes in the rest of the program, however often it is multiplied on its way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from scale_check.recording import Key, Recording
from scale_check.summary import Recorded, float_values


@torch.no_grad()
def perturb(model: nn.Module, seed: int) -> None:
    """Changes each weight by one unit of its last place, up or down by a seed."""
    drawn = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.is_floating_point():
            local: Tensor = param.to_local() if hasattr(param, "to_local") else param  # One process has all of it.
            signs = torch.randint(0, 2, local.shape, generator=drawn).to(local) * 2 - 1
            local.add_(local * torch.finfo(local.dtype).eps * signs)


def measure(plain: Recording, others: Sequence[Recording]) -> Mapping[Key, float]:
    """Returns of each tensor the largest change in other runs of the program; at least a unit of the last place."""
    return {key: _change(tensor, [other.tensors.get(key) for other in others]) for key, tensor in plain.tensors.items()}


def _change(tensor: Recorded, others: Sequence[Recorded | None]) -> float:
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return 0.0
    wide = float_values(tensor)
    finite = wide[wide.isfinite()]
    least = float(finite.abs().max()) * torch.finfo(tensor.dtype).eps if finite.numel() else 0.0
    changes = [
        float((wide - float_values(other)).abs().nan_to_num(0.0, 0.0, 0.0).max())
        for other in others
        if type(other) is type(tensor) and other.shape == tensor.shape
    ]
    return max([least, *changes])
