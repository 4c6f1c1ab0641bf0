"""Reports gradients by source rank, where the gradient that autograd shows is of the samples of several ranks.

The rank that has an expert computes with the tokens of all ranks that divide the experts, so an expert's gradient is
the sum over these. And a hook that averages gradients over ranks shows the average to the hooks after it. An observer
that needs the gradient of each rank's own samples, as AdaScale does, gets it here. Without one nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from scale_core.comm.group import Group
from scale_core.hooks.gradients import gradient_hooks
from scale_core.records import ParamRecord
from scale_core.shard import shard_of

SourceGradHook = Callable[[Tensor, Tensor, int], None]  # given a parameter, a gradient, and the rank that it is of


def register_source_grad_hook(callback: SourceGradHook) -> RemovableHandle:
    """Calls `callback(param, grad, source)` with gradients of the samples of one rank alone, in the backward pass.

    `param` is the tensor that the module computes with, which under fully_shard is the unsharded one; `grad` has its
    shape, and is borrowed; `source` is a rank of `source_group(param)`. A gradient that is zero may be left out, but
    each parameter that gets a gradient in a pass is reported at least once. One that is used several times in a pass is
    reported for each use.
    """
    return gradient_hooks.by_source.register(callback)


def has_source_grad_hooks() -> bool:
    """Whether there are observers of such gradients."""
    return bool(gradient_hooks.by_source)


def call_source_grad_hooks(param: Tensor, grad: Tensor, source: int) -> None:
    """Calls the hooks of `register_source_grad_hook`."""
    for callback in list(gradient_hooks.by_source.values()):
        callback(param, grad, source)


def mark_averaged(param: Tensor, group: Group) -> None:
    """Records that a hook of autograd averages the gradient of `param` over these ranks, and reports it before."""
    ParamRecord.get_or_create(param).averaged_over = group


def source_group(param: Tensor) -> Group | None:
    """The ranks whose samples the gradient of `param` is of where a hook of autograd sees it; None if they are its own.

    Of a shard it is the axis whose ranks divide the parameter and compute with each other's samples
    (`scale_core.shard.Axis.num_sources`).
    """
    shard = shard_of(param)
    for axis in () if shard is None else shard.axes:
        if axis.num_sources > 1:
            return axis.group
    record = ParamRecord.get(param)
    return None if record is None else record.averaged_over


def with_source_grads(tensor: Tensor, param: Tensor, source: int) -> Tensor:
    """Returns the same values, for a use with the samples of one rank; the gradient of that use is reported.

    Args:
        tensor: The tensor to compute with: `param`, or one made from it with its shape.
        param: By which the gradient is reported.
        source: The rank of `source_group(param)` whose samples it is used with.
    """
    return cast(Tensor, _ReportGradient.apply(tensor, param, source))  # type: ignore[no-untyped-call]


class _ReportGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, param: Tensor, source: int) -> Tensor:
        ctx.reported = param, source
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        param, source = ctx.reported
        call_source_grad_hooks(param, grad, source)
        return grad, None, None
