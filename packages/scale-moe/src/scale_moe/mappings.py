"""Sums over ranks, as regions of the forward: of experts whose hidden features are divided.

The input is the same on all these ranks, the outputs are summed.

    tokens, weights  -> identity    -> dispatch, experts, combine -> all-reduce -> outputs
    their gradients  <- all-reduce  <-       summands             <- identity   <-

Outputs are summed where each token has added up its experts' rows already: T rows, where the experts have k * T.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core.comm.group import Group
from scale_core.comm.rank_order_sum import all_reduce_in_rank_order
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.errors import TransferError


def copy_to_expert_tensor_parallel_region(tensor: Tensor, group: Group, name: str) -> Tensor:
    """Returns `tensor` [T, dim]; its gradient is summed over the ranks, because each has its own hidden features."""
    if group.size == 1:
        return tensor
    return cast(Tensor, _Copy.apply(tensor, group, name))  # type: ignore[no-untyped-call]  # torch leaves it untyped


def reduce_from_expert_tensor_parallel_region(tensor: Tensor, group: Group, name: str) -> Tensor:
    """Returns the sum of `tensor` [T, dim] over the ranks; each summand gets the same gradient [T, dim]."""
    if group.size == 1:
        return tensor
    return cast(Tensor, _Sum.apply(tensor, group, name))  # type: ignore[no-untyped-call]  # torch leaves it untyped


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, name: str) -> Tensor:
        ctx.group, ctx.name = group, name
        return tensor.view_as(tensor)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduced(grad, ctx.group, "gradients of tokens", ctx.name), None, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, name: str) -> Tensor:
        return all_reduced(tensor, group, "outputs", name)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad, None, None


def all_reduced(tensor: Tensor, group: Group, what: str, name: str, *, average: bool = False) -> Tensor:
    """Returns the sum or average over the ranks, the same bits on all of them; `name` is whose it is, in errors.

    Ranks at different tensors of one shape never read each other's data on the host, because the tag tells them apart.
    """
    flat = tensor.detach().contiguous().view(-1)
    tag = message_tag(Event(f"{what} {flat.dtype} {flat.numel()}", name))
    try:
        return all_reduce_in_rank_order(flat, group, average=average, tag=tag).wait().view_as(tensor)
    except TransferError as error:
        error.add_note(
            f"in the {'average' if average else 'sum'} of the {what} of '{name}' over the ranks {list(group.ranks)}: "
            "has each of them computed them, in the same order?"
        )
        raise
