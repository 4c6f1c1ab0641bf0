"""Linear layers without sequence parallelism whose all-reduces overlap with their own matrix products.

A column parallel layer sums the gradient of its input while the gradient of its weight is computed. A row parallel
layer cuts its rows into pieces: the sum of one is sent while the next is multiplied. The numbers are the same as
without overlap, as in `collective_matmul`, and gradients of gradients do not pass.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.comm.group import Group
from scale_core.shard import on_local_tensors
from scale_core.sharded_tensor.tensor import local_tensor
from scale_tp.async_tp.chunks import product_dtype, to_rows, without_autocast
from scale_tp.comm import PendingTensor, RegionEntry, RegionExit, apply, start_all_reduce


def linear_with_grad_all_reduce(
    input: Tensor, weight: Tensor, bias: Tensor | None, group: Group
) -> tuple[Tensor, Tensor]:
    """Multiplies an input that all ranks have; its gradient is summed while the weight gradient is computed.

    Returns the input inside of the region, for other readers, and [..., outputs of this rank].
    """
    compute = product_dtype(input, [weight])
    if group.size == 1 or not input.requires_grad:
        return input, F.linear(input, weight, bias)
    outputs: tuple[Tensor, Tensor] = apply(
        _LinearWithGradAllReduce, group, input, weight.to(compute), None if bias is None else bias.to(compute)
    )
    return outputs


def linear_all_reduce(input: Tensor, weight: Tensor, group: Group, pieces: int) -> Tensor:
    """Multiplies [..., features of this rank] and sums over the ranks, `pieces` of the rows one after the other."""
    compute = product_dtype(input, [weight])
    output: Tensor = apply(_LinearAllReduce, group, pieces, input.to(compute), weight.to(compute))
    return output


class _LinearWithGradAllReduce(RegionEntry):
    @staticmethod
    def forward(ctx: Any, group: Group, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.group, ctx.dtype = group, input.dtype
        ctx.set_materialize_grads(False)
        multiplied = input.to(weight.dtype)  # This is kept, as autocast keeps it.
        ctx.save_for_backward(multiplied, local_tensor(weight))
        with without_autocast(input):
            return input, F.linear(multiplied, weight, bias)

    @staticmethod
    @once_differentiable
    @on_local_tensors
    def backward(ctx: Any, total: Tensor | None, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _, _, wants_weight, wants_bias = ctx.needs_input_grad
        weight_grad = bias_grad = None
        with without_autocast(input):
            if grad is not None:
                input_grad = (to_rows(grad) @ weight).to(ctx.dtype).view(input.shape)
                total = input_grad if total is None else total + input_grad
            assert total is not None, "autograd asks for no gradients where there are none"
            pending = start_all_reduce(total, ctx.group)
            if grad is not None and wants_weight:
                weight_grad = to_rows(grad).mT @ to_rows(input).to(grad.dtype)
            if grad is not None and wants_bias:
                bias_grad = to_rows(grad).sum(0)
            return None, pending.wait(), weight_grad, bias_grad


class _LinearAllReduce(RegionExit):
    @staticmethod
    def forward(ctx: Any, group: Group, pieces: int, input: Tensor, weight: Tensor) -> Tensor:
        ctx.group = group
        ctx.save_for_backward(input, local_tensor(weight))
        rows = to_rows(input)
        total = input.new_empty(rows.shape[0], weight.shape[0])
        previous: tuple[Tensor, PendingTensor] | None = None
        with without_autocast(input):
            for piece, output in zip(rows.tensor_split(pieces), total.tensor_split(pieces), strict=True):
                pending = start_all_reduce(piece @ weight.mT, group)
                if previous is not None:  # While this one is sent.
                    previous[0].copy_(previous[1].wait())
                previous = output, pending
        assert previous is not None, "there is at least one piece"
        previous[0].copy_(previous[1].wait())
        return total.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    @on_local_tensors
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _, _, wants_input, wants_weight = ctx.needs_input_grad
        rows = to_rows(grad)
        with without_autocast(input):
            input_grad = (rows @ weight).view(input.shape) if wants_input else None
            return None, None, input_grad, rows.mT @ to_rows(input) if wants_weight else None
