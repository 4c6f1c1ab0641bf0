"""In which dtypes a unit computes and communicates: a policy, and the arguments that FairScale spelled it with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from scale_core.nested import map_tensors


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of one unit; None leaves things as they are.

    The local shards, their gradients and so the optimizer keep the dtype that the parameters were built in.

    Attributes:
        param_dtype: Of the gathered parameters, of the floating-point inputs of the outermost unit, and so of the
            computation.
        reduce_dtype: Of the gradients on their way between ranks; None is `param_dtype`.
        output_dtype: Of the module's floating-point outputs.
        buffer_dtype: Of the module's floating-point buffers. None is right nearly always: rotary frequencies and
            running statistics don't survive half precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecision({name}=...): expected a floating-point torch.dtype, got {dtype!r}")


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Returns tensors in containers of any kind, those of floating-point numbers in this dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def resolve_precision(
    mixed_precision: bool | MixedPrecision,
    *,
    compute_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    fp32_reduce_scatter: bool | None = None,
) -> MixedPrecision:
    """Returns the policy behind the arguments of `fully_shard`.

    Args:
        mixed_precision: A policy; True is fp16 parameters and reduction; False leaves all dtypes alone.
        compute_dtype: FairScale's name for `param_dtype`.
        buffer_dtype: As in the policy.
        fp32_reduce_scatter: FairScale's name for `reduce_dtype=torch.float32`; None is False.

    Raises:
        TypeError: `mixed_precision` is neither.
        ValueError: A policy and one of the other three, or `fp32_reduce_scatter` without `mixed_precision`.
    """
    if isinstance(mixed_precision, MixedPrecision):
        given = {
            "compute_dtype": compute_dtype,
            "buffer_dtype": buffer_dtype,
            "fp32_reduce_scatter": fp32_reduce_scatter,
        }
        extra = [name for name, value in given.items() if value is not None]
        if extra:
            raise ValueError(
                f"a MixedPrecision policy was given and {', '.join(extra)} beside it: say it in the policy, "
                "MixedPrecision(param_dtype=..., reduce_dtype=..., buffer_dtype=...)"
            )
        return mixed_precision
    if not isinstance(mixed_precision, bool):
        raise TypeError(f"mixed_precision: expected a bool or a MixedPrecision, got {type(mixed_precision).__name__}")
    if not mixed_precision:
        if fp32_reduce_scatter:
            raise ValueError("fp32_reduce_scatter requires mixed_precision=True: without it gradients keep their dtype")
        return MixedPrecision(param_dtype=compute_dtype, buffer_dtype=buffer_dtype)
    param_dtype = compute_dtype or torch.float16
    reduce_dtype = torch.float32 if fp32_reduce_scatter else param_dtype
    return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)
