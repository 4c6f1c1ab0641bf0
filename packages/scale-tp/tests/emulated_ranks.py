"""What the ranks of a group compute together, computed by one process in the same order of sums.

A tensor that all ranks have is one tensor here, and one that each rank has its own of is a list. Sums go in rank order,
those of half precision in fp32 with one rounding: that is what the package promises. So results are equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from scale_tp.split import Split


def add_in_order(summands: Sequence[Tensor]) -> Tensor:
    wide = torch.float32 if summands[0].dtype in (torch.bfloat16, torch.float16) else summands[0].dtype
    total = summands[0].to(wide)
    for summand in summands[1:]:
        total = total + summand.to(wide)
    return total.to(summands[0].dtype)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, num_ranks: int) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for _ in range(num_ranks))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return add_in_order(grads), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *summands: Tensor) -> Tensor:
        ctx.count = len(summands)
        return add_in_order(summands)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return (grad,) * ctx.count


class _Together(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dim: int, *parts: Tensor) -> Tensor:
        ctx.dim, ctx.sizes = dim, [part.shape[dim] for part in parts]
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Of memory of their own, as a rank has them: a sum over a tensor goes through its memory.
        return None, *(part.contiguous() for part in grad.split(ctx.sizes, ctx.dim))


def copies(tensor: Tensor, num_ranks: int) -> list[Tensor]:
    """For each rank; their gradients are added in rank order."""
    return list(_Copies.apply(tensor, num_ranks)) if num_ranks > 1 else [tensor]


def total(summands: Sequence[Tensor]) -> Tensor:
    return _Sum.apply(*summands) if len(summands) > 1 else summands[0]


def column(x: Tensor, weight: Tensor, bias: Tensor | None, split: Split) -> list[Tensor]:
    """The output features of each rank."""
    ranks = range(split.num_ranks)
    weights = [split.take(weight, rank).contiguous() for rank in ranks]
    biases = [None if bias is None else split.take(bias, rank).contiguous() for rank in ranks]
    return [F.linear(x_, w, b) for x_, w, b in zip(copies(x, len(ranks)), weights, biases, strict=True)]


def row(parts: Sequence[Tensor], weight: Tensor, bias: Tensor | None, split: Split) -> Tensor:
    """The sum of what each rank's input features give."""
    if len(parts) == 1:
        return F.linear(parts[0], weight, bias)
    products = [F.linear(x, split.take(weight, rank, 1).contiguous()) for rank, x in enumerate(parts)]
    return total(products) if bias is None else total(products) + bias


def on_parts(x: Tensor, dim: int, split: Split, *params: Tensor) -> list[tuple[Tensor, ...]]:
    """Each rank's part of the sequence, with the parameters, whose gradients are added in rank order."""
    parts = [split.take(x, rank, dim).contiguous() for rank in range(split.num_ranks)]
    by_rank = [copies(param, split.num_ranks) for param in params]
    return list(zip(parts, *by_rank, strict=True))


def together(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The full sequence."""
    return _Together.apply(dim, *parts)
