"""Weights that torchao computes with in fp8, and that are gathered so: a byte each, and one scale for the tensor.

torchao makes a weight such a tensor by `Float8LinearConfig(enable_fsdp_float8_all_gather=True)`. The methods that
FSDP2 calls on it are called here: `fsdp_pre_all_gather` casts a shard, `fsdp_post_all_gather` puts a tensor around the
gathered data.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import UNTAGGED, all_gather, all_reduce
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork
from scale_core.flat.buffer import part_of
from scale_core.flat.layout import ShardSpan
from scale_core.flat.transport import ReduceWork, ShardTransport
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
        """Returns the record of a weight of torchao; None for any other tensor. Does not load torchao."""
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
        """Returns the tensor that torchao computes with, around `data`, fp8; its gradient goes to `param`."""
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


class Float8Transport(ShardTransport):
    """Gathers weights in fp8; the ranks first look for the largest magnitude of each.

    Args:
        transport: Sends the gradients.
        weights: How torchao computes with each parameter.
        spans: The part of each in this rank's shard.
        group: The ranks, at least two.
    """

    def __init__(
        self, transport: ShardTransport, weights: Sequence[Float8Weight], spans: Sequence[ShardSpan], group: Group
    ) -> None:
        self.inner, self.weights, self.spans, self.group = transport, weights, spans, group
        self.deferred, self.feedback, self.all_gather_dtype = transport.deferred, transport.feedback, weights[0].dtype
        self.traits = replace(transport.traits, gathers_in_halves=True, gathers_messages=True, reads_shard_late=True)
        self.scales: list[Tensor] = []  # Of the last gather, [] each

    def all_gather(
        self, all_gather_input: Tensor, all_gather_output: Tensor, *, tag: int = UNTAGGED, copies_input: bool = False
    ) -> CollectiveWork:
        # In every gather: no rank can know alone whether the shard of another one was written to.
        shard = all_gather_input.clone() if copies_input else all_gather_input
        output = all_gather_output.view(torch.uint8)
        message = part_of(output, self.group)
        pieces = [shard.narrow(0, span.shard_offset, span.numel) for span in self.spans]
        zero = torch.zeros((), device=shard.device)
        amax = [torch.linalg.vector_norm(piece, torch.inf).float() if len(piece) else zero for piece in pieces]
        largest = torch.stack(amax)

        def gather(_: Tensor) -> CollectiveWork:
            self.deferred.fill(message, lambda: self._cast(pieces, largest, message))
            return all_gather(output, message, self.group, tag=tag)

        return all_reduce(largest, self.group, op="max").then(gather)

    def _cast(self, pieces: Sequence[Tensor], amax: Tensor, message: Tensor) -> Tensor:
        """Fills this rank's message, uint8 [S], with the pieces in fp8; `amax` is the largest magnitude of each."""
        self.scales = [weight.scale(largest) for weight, largest in zip(self.weights, amax.unbind(), strict=True)]
        for weight, scale, span, piece in zip(self.weights, self.scales, self.spans, pieces, strict=True):
            if span.numel:
                weight.cast(piece, scale, message.narrow(0, span.shard_offset, span.numel))
        return message

    def post_all_gather(self, index: int, unsharded_param: Tensor, data: Tensor) -> Tensor:
        return self.weights[index].gathered(unsharded_param, data, self.scales[index])

    def reduce(
        self, reduce_scatter_input: Tensor, dtype: torch.dtype, *, tag: int = UNTAGGED, divisor: float | None = None
    ) -> ReduceWork:
        return self.inner.reduce(reduce_scatter_input, dtype, tag=tag, divisor=divisor)
