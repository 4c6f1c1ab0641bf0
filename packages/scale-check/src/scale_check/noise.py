"""Measures the rounding of a program: by how much each of its tensors changes where nothing changes but rounding.

The program runs again with weights that are one unit of the last place larger or smaller, at random. What differs then
is what the rounding of one operation becomes in the rest of the program, however often it is multiplied on its way.

Mixed precision is off meanwhile. Its casts hide such a change of float32 weights, and their rounding is as large as a
bug. Casts that a model makes itself stay, as the float32 of a norm in a model of float64: then weights change by a unit
of the last place of the dtype that it casts to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scale_check.recording import Key, Recording
from scale_check.summary import Recorded, float_values


@contextmanager
def full_precision() -> Iterator[None]:
    """Switches `torch.autocast` off, and the dtypes of FSDP2's policies."""
    from torch.distributed.fsdp import MixedPrecisionPolicy  # The first optimizer of a process imports it anyway.

    autocast_init, policy_init = torch.autocast.__init__, MixedPrecisionPolicy.__init__

    def init_disabled(
        self: torch.autocast,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> None:
        autocast_init(self, device_type, dtype, False, cache_enabled)

    def init_without_cast(self: MixedPrecisionPolicy, *args: Any, **kwargs: Any) -> None:
        policy_init(self, *args, **kwargs)
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "param_dtype_override_fn"):
            if hasattr(self, name):  # torch 2.15 has the last one.
                object.__setattr__(self, name, None)  # The policy is frozen.

    torch.autocast.__init__ = init_disabled  # type: ignore[method-assign]
    MixedPrecisionPolicy.__init__ = init_without_cast  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = autocast_init  # type: ignore[method-assign]
        MixedPrecisionPolicy.__init__ = policy_init  # type: ignore[method-assign]


class CastRecorder(TorchDispatchMode):
    """A context that finds the least precise dtype to which a program casts tensors of a more precise one.

    Attributes:
        eps: The relative rounding of this dtype; 0 if no cast loses precision.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS:
            source = args[_CASTS[func]]
            if source.is_floating_point() and result.is_floating_point():
                eps = torch.finfo(result.dtype).eps
                if eps > torch.finfo(source.dtype).eps:
                    self.eps = max(self.eps, eps)
        return result


# Operators that convert, and the place of what they convert among their arguments.
_CASTS = {torch.ops.aten._to_copy.default: 0, torch.ops.aten.copy_.default: 1}


@torch.no_grad()
def perturb(model: nn.Module, seed: int, cast_eps: float = 0.0) -> None:
    """Changes each weight by a unit of its last place or by `cast_eps` of it, if that is more; up or down by a seed."""
    drawn = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        if param.is_floating_point():
            local: Tensor = param.to_local() if hasattr(param, "to_local") else param  # One process has all of it.
            signs = torch.randint(0, 2, local.shape, generator=drawn).to(local) * 2 - 1
            local.add_(local * max(torch.finfo(local.dtype).eps, cast_eps) * signs)


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
