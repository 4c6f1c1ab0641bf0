"""Linear layers without sequence parallelism, whose sums over the ranks run beside their own matrix products.

A column parallel layer sums the gradient of its input while that of its weight is computed. A row parallel layer cuts
its rows into pieces: the sum of one travels while the next is multiplied. The numbers are those without overlap, as in
`collective_matmul`, and gradients of gradients do not pass.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.comm.group import Group
from scale_tp.async_tp.chunks import dtype_of_products, rows_of, without_autocast
from scale_tp.autograd_regions import Entering, Leaving, cross
from scale_tp.comm import Coming, begin_sum


def copied_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group) -> tuple[Tensor, Tensor]:
    """Multiplies what all ranks have; its gradient is summed over the ranks while that of the weight is computed.

    Args:
        input: [..., features], the same on all ranks.
        weight: [outputs of this rank, features].
        bias: [outputs of this rank], or None.
        group: The ranks.

    Returns:
        The input inside of the divided region, for others to read, and [..., outputs of this rank].

    Raises:
        ValueError: The dtypes do not fit.
    """
    compute = dtype_of_products(input, [weight])
    if group.size == 1 or not input.requires_grad:
        return input, F.linear(input, weight, bias)
    factor, summand = weight.to(compute), None if bias is None else bias.to(compute)
    found: tuple[Tensor, Tensor] = cross(_CopyLinear, group, input, factor, summand)
    return found


def linear_sum(input: Tensor, weight: Tensor, group: Group, pieces: int) -> Tensor:
    """Multiplies with a weight and sums over the ranks, piece by piece: one travels while the next is computed.

    Args:
        input: [..., features of this rank].
        weight: [outputs, features of this rank].
        group: The ranks.
        pieces: Into how many the rows of the input are cut.

    Returns:
        [..., outputs], the same on all ranks.

    Raises:
        TransferError: A rank did not take part.
        ValueError: The dtypes do not fit.
    """
    compute = dtype_of_products(input, [weight])
    found: Tensor = cross(_LinearSum, group, pieces, input.to(compute), weight.to(compute))
    return found


class _CopyLinear(Entering):
    @staticmethod
    def forward(ctx: Any, ranks: Group, input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.ranks, ctx.dtype = ranks, input.dtype
        ctx.set_materialize_grads(False)
        multiplied = input.to(weight.dtype)  # This is kept, as autocast keeps it.
        ctx.save_for_backward(multiplied, weight)
        with without_autocast(input):
            return input, F.linear(multiplied, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, total: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _, _, wants_weight, wants_bias = ctx.needs_input_grad
        of_weight = of_bias = None
        with without_autocast(input):
            if gradient is not None:
                of_input = (rows_of(gradient) @ weight).to(ctx.dtype).view(input.shape)
                total = of_input if total is None else total + of_input
            assert total is not None, "nobody asks for gradients where there are none"
            coming = begin_sum(total, ctx.ranks)
            if gradient is not None and wants_weight:
                of_weight = rows_of(gradient).mT @ rows_of(input).to(gradient.dtype)
            if gradient is not None and wants_bias:
                of_bias = rows_of(gradient).sum(0)
            return None, coming.wait(), of_weight, of_bias


class _LinearSum(Leaving):
    @staticmethod
    def forward(ctx: Any, ranks: Group, pieces: int, input: Tensor, weight: Tensor) -> Tensor:
        ctx.ranks = ranks
        ctx.save_for_backward(input, weight)
        rows = rows_of(input)
        total = input.new_empty(rows.shape[0], weight.shape[0])
        before: tuple[Tensor, Coming] | None = None
        with without_autocast(input):
            for piece, place in zip(rows.tensor_split(pieces), total.tensor_split(pieces), strict=True):
                coming = begin_sum(piece @ weight.mT, ranks)
                if before is not None:  # While this one travels.
                    before[0].copy_(before[1].wait())
                before = place, coming
        assert before is not None, "there is at least one piece"
        before[0].copy_(before[1].wait())
        return total.view(*input.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        _, _, wants_input, wants_weight = ctx.needs_input_grad
        rows = rows_of(gradient)
        with without_autocast(input):
            of_input = (rows @ weight).view(input.shape) if wants_input else None
            return None, None, of_input, rows.mT @ rows_of(input) if wants_weight else None
