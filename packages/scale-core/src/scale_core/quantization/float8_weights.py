"""Weights that torchao computes with in fp8, and that are gathered so: a byte each, and one scale for the tensor.

torchao makes a weight such a tensor by `Float8LinearConfig(enable_fsdp_float8_all_gather=True)`. The methods that
FSDP2 calls on it is called here: `fsdp_pre_all_gather` casts a shard, `fsdp_post_all_gather` puts a tensor around the
gathered data.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from scale_core.parameters import copy_attributes


@dataclass(frozen=True)
class Float8Weight:
    """How torchao, which is loaded then, computes with one weight.

    Attributes:
        kind: The class of the tensor.
        mm_config: Of its products.
        dtype: Of its numbers in fp8.
    """

    kind: type[Any]
    mm_config: Any
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Float8Weight | None:
        """Returns that of a weight; None for any other tensor. Does not load torchao."""
        torchao = sys.modules.get("torchao.float8.fsdp_utils")
        if torchao is None or not isinstance(tensor, torchao.WeightWithDynamicFloat8CastTensor):
            return None
        weight: Any = tensor
        return cls(torchao.WeightWithDynamicFloat8CastTensor, weight._linear_mm_config, weight._dtype)

    def scale(self, amax: Tensor) -> Tensor:
        """Returns the factor of a weight with the largest magnitude `amax`, fp32 [], before it is cast."""
        return cast(Tensor, sys.modules["torchao.float8.float8_utils"].amax_to_scale(amax, self.dtype))

    def cast(self, values: Tensor, scale: Tensor, out: Tensor) -> None:
        """Fills `out`, uint8 of the shape of `values`, with these in fp8."""
        (casted,), _ = self._around(values, scale).fsdp_pre_all_gather(None)
        out.copy_(casted.view(torch.uint8))

    def gathered(self, param: Tensor, data: Tensor, scale: Tensor) -> Tensor:
        """Returns the tensor that torchao computes with, around `data`, fp8; its gradient is that of `param`."""
        with torch.enable_grad():  # Also in a backward pass, whose recomputation takes gradients of it.
            weight: Tensor = _Gathered.apply(param, data, scale, self)  # type: ignore[no-untyped-call]
        return weight

    def _around(self, values: Tensor, scale: Tensor) -> Any:
        return self.kind(values, self.mm_config, self.dtype, precomputed_scale=scale)


class _Gathered(torch.autograd.Function):
    """A tensor in fp8 in the place of a parameter that has no memory."""

    @staticmethod
    def forward(ctx: Any, param: Tensor, data: Tensor, scale: Tensor, weight: Float8Weight) -> Tensor:
        ctx.set_materialize_grads(False)
        around = weight._around(torch.empty_like(param, device="meta"), scale)  # It looks at the memory.
        gathered: Tensor = around.fsdp_post_all_gather((data,), (scale,), param.dtype)[0]
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None, None


def plain_parameter(param: nn.Parameter) -> nn.Parameter:
    """Returns a parameter of the plain tensor inside a weight, whose memory it shares."""
    weight: Any = param
    plain = nn.Parameter(weight._tensor.detach(), param.requires_grad)
    copy_attributes(param, plain, leave_out=("_tensor", "_linear_mm_config", "_dtype", "_precomputed_scale"))
    return plain
