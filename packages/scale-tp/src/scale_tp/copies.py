"""Parameters of which some ranks hold copies: the key-value heads where there are fewer of these than ranks.

Each rank that holds a copy computes with other query heads, so each has a summand of its gradient. They add what the
others have in rank order, so that the copies stay alike to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scale_core.collectives import all_to_all
from scale_core.group import Group
from scale_tp.split_sizes import Split
from scale_tp.tags import tag_of
from scale_tp.wide import wide_dtype


def holders(split: Split, rank: int) -> list[int]:
    """Returns the ranks that have the same indices as this one, itself included; in order.

    Example:
        >>> holders(Split(2, (((0, 1),), ((0, 1),), ((1, 2),))), 1)
        [0, 1]
    """
    return [other for other, ranges in enumerate(split.ranges) if ranges == split.ranges[rank]]


def has_copies(split: Split) -> bool:
    """Whether some ranks have the same indices; it is the same on all of them."""
    return any(not split.counts(rank) and split.sizes[rank] for rank in range(split.num_ranks))


def sum_gradients_of_copies(param: Tensor, group: Group, split: Split) -> Tensor:
    """Returns the parameter as it is; its gradient is summed over the ranks that hold a copy.

    Args:
        param: [any shape], this rank's part.
        group: The ranks; where none of them holds a copy, nothing is sent.
        split: Which of the whole parameter each rank has.
    """
    if group.size == 1 or not has_copies(split):
        return param
    summed: Tensor = _SumOfCopies.apply(param, group, holders(split, group.rank))  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return summed


class _SumOfCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, group: Group, ranks: list[int]) -> Tensor:
        ctx.group, ctx.ranks = group, ranks
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return sum_of_copies(gradient, ctx.group, ctx.ranks), None, None


def sum_of_copies(tensor: Tensor, group: Group, ranks: list[int]) -> Tensor:
    """Returns the sum over some ranks of the group, each with its own; all ranks of the group call it."""
    flat = tensor.contiguous().view(-1)
    others = [rank for rank in ranks if rank != group.rank]
    sizes = [flat.numel() if rank in others else 0 for rank in range(group.size)]
    received = flat.new_empty(sum(sizes))
    tag = tag_of("gradients of copies", flat.dtype, tuple(tensor.shape))
    given = flat.repeat(len(others))
    all_to_all(received, given, group, output_sizes=sizes, input_sizes=sizes, tag=tag).wait()
    parts = dict(zip(others, received.split(flat.numel()) if others else (), strict=True))
    parts[group.rank] = flat
    total = torch.zeros(flat.shape, dtype=wide_dtype(flat.dtype), device=flat.device)
    for rank in sorted(parts):
        total += parts[rank]
    return total.to(tensor.dtype).view(tensor.shape)
