"""Measures the rounding of a program: by how much each of its tensors changes where nothing changes but rounding.

The program runs again with weights that are one unit of the last place larger or smaller, at random. What differs then
is what the rounding of one operation becomes in the rest of the program, however often it is multiplied on its way.

Mixed precision is off meanwhile. Its casts hide such a change of float32 weights, and their rounding is as large as a
bug. Casts that a model makes itself stay, as the float32 of a norm in a model of float64: then weights change by a unit
of the last place of the dtype that it casts to. For weights in a dtype of 16 bits, and for casts to one, a tenth of the
change is the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scale_check.recording import Key, Phase, Recording
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


# Less precise dtypes than float32 round by so much that a hundred times that is as large as any bug. In right programs
# the ranks differ by at most 1 times this change, because few numbers round differently. Without averaging they differ
# by 14 to 256 times it.
_LARGEST_EPS = 1e-4
_SHARE_OF_LARGE_EPS = 0.1


class CastRecorder(TorchDispatchMode):
    """A context that finds the least precise dtype to which a program casts tensors of a more precise one.

    Compiled functions run without their compilation meanwhile, because torch compiles none in a dispatch mode.

    Attributes:
        eps: The relative rounding of this dtype; 0 if no cast loses precision.
    """

    supports_higher_order_operators = True  # Such as flex_attention

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.eps = 0.0
        self._stances = ExitStack()

    def __enter__(self) -> Self:
        self._stances.enter_context(torch.compiler.set_stance("force_eager"))  # fullgraph=True would raise an error.
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._stances.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _CASTS:
            source = args[_CASTS[func]]
            if all(tensor.is_floating_point() or tensor.is_complex() for tensor in (source, result)):
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


def measure(
    plain: Recording, others: Sequence[Recording], of_casts: Sequence[Recording] = (), cast_eps: float = 0.0
) -> Mapping[Key, float]:
    """Returns of each tensor the largest change in other runs of the program; at least a unit of the last place.

    Args:
        plain: The program.
        others: With weights changed by a unit of their last place.
        of_casts: With weights changed by `cast_eps`.
        cast_eps: The rounding of casts in the program.
    """
    weights = [plain.tensors[key].dtype for key in plain.keys_of(Phase.START)]
    eps = max((torch.finfo(dtype).eps for dtype in weights if dtype.is_floating_point), default=0.0)
    runs = [(other.tensors, eps) for other in others] + [(other.tensors, cast_eps) for other in of_casts]
    return {
        key: max([_least(tensor), *(_rounding(tensor, tensors.get(key), eps) for tensors, eps in runs)])
        for key, tensor in plain.tensors.items()
    }


def _least(tensor: Recorded) -> float:
    """A unit of the last place of the largest element; of a dtype of 16 bits the share of it that is rounding."""
    if not tensor.dtype.is_floating_point:
        return 0.0
    eps = torch.finfo(tensor.dtype).eps
    return _largest(tensor) * eps * (_SHARE_OF_LARGE_EPS if eps > _LARGEST_EPS else 1.0)


def _rounding(tensor: Recorded, other: Recorded | None, eps: float) -> float:
    """The rounding of a tensor, by a run whose weights were changed by `eps` of themselves."""
    if not tensor.dtype.is_floating_point or not tensor.numel():
        return 0.0
    if other is None or type(other) is not type(tensor) or other.shape != tensor.shape:
        return 0.0
    change = float((float_values(tensor) - float_values(other)).abs().nan_to_num(0.0, 0.0, 0.0).max())
    # Tensors before the first weight or cast of 16 bits change by less, which is the rounding of their own dtype.
    is_large = eps > _LARGEST_EPS and change > _LARGEST_EPS * _largest(tensor)
    return change * (_SHARE_OF_LARGE_EPS if is_large else 1.0)


def _largest(tensor: Recorded) -> float:
    values = float_values(tensor)
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
