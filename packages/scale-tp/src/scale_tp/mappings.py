"""The collectives of tensor parallelism, with their gradients: each is another one's backward.

| forward            | backward           | region                                       |
|--------------------|--------------------|----------------------------------------------|
| nothing            | sum over the ranks | `copy_to_model_parallel_region`              |
| sum over the ranks | nothing            | `reduce_from_model_parallel_region`          |
| this rank's part   | the parts together | `scatter_to_model_parallel_region`           |
| the parts together | this rank's part   | `gather_from_model_parallel_region`          |
| the parts together | part of the sum    | `gather_from_sequence_parallel_region`       |
| part of the sum    | the parts together | `reduce_scatter_to_sequence_parallel_region` |

A rank leaves a plain region, in which all ranks compute the same, through the first and the third, and comes back
through the second and the fourth. In a sequence parallel region each rank has its part of the sequence, and the last
two take the place of the first two. No tensor is changed in place, and gradients of gradients pass as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from scale_core.comm.collectives import all_to_all
from scale_core.comm.group import Group, GroupLike
from scale_core.compat import untraced
from scale_tp.autograd_regions import Entering, Leaving, cross, divides
from scale_tp.comm import (
    gather_along,
    part_along,
    parts_of,
    sizes_of_all,
    sum_over,
    sum_scatter_along,
    tag_of,
    wide_dtype,
)
from scale_tp.parallel_state import layer_group
from scale_tp.sequence_lengths import explained, parts_held, tell_parts
from scale_tp.split import Split

Sizes = Sequence[int] | None


def copy_to_model_parallel_region(input_: Tensor, group: GroupLike = None) -> Tensor:
    """Returns the input as it is; its gradient is summed over the ranks, each of which computed with its own part.

    Args:
        input_: [any shape], the same on all ranks.
        group: The ranks; None is the model axis.
    """
    ranks = layer_group(group)
    if ranks.size == 1:
        return input_
    _check_tensor(input_)
    copied: Tensor = cross(_Copy, ranks, input_)
    return copied


def copy_all_to_model_parallel_region(*inputs: Tensor, group: GroupLike = None) -> tuple[Tensor, ...]:
    """The same for several tensors, whose gradients are summed in one message: the small parameters of a norm.

    Args:
        *inputs: [any shapes] of one dtype and device, the same on all ranks.
        group: The ranks; None is the model axis.
    """
    ranks = layer_group(group)
    if ranks.size == 1 or not inputs:
        return inputs
    copied: tuple[Tensor, ...] = cross(_CopyAll, ranks, *inputs)
    return copied


def reduce_from_model_parallel_region(input_: Tensor, group: GroupLike = None) -> Tensor:
    """Returns the sum over the ranks; the gradient goes to each summand as it is.

    Args:
        input_: [any shape]: a summand; of one shape on all ranks. It is not changed.
        group: The ranks; None is the model axis.
    """
    ranks = layer_group(group)
    if ranks.size == 1:
        return input_
    _check_tensor(input_)
    total: Tensor = cross(_Reduce, ranks, input_)
    return total


def scatter_to_model_parallel_region(
    input_: Tensor, group: GroupLike = None, *, dim: int = -1, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part along `dim`; the gradients of the parts are put together.

    Args:
        input_: [..., N, ...], the same on all ranks.
        group: The ranks; None is the model axis.
        dim: The dimension that is divided.
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.
    """
    ranks = layer_group(group)
    if ranks.size == 1:
        return input_
    part: Tensor = cross(_Scatter, ranks, input_, dim, tuple(parts_of(_size(input_, dim), ranks, sizes)))
    return part


def gather_from_model_parallel_region(
    input_: Tensor, group: GroupLike = None, *, dim: int = -1, sizes: Sizes = None
) -> Tensor:
    """Returns the parts of all ranks along `dim`, in rank order; each gets its part of the gradient.

    Args:
        input_: [..., n of this rank, ...].
        group: The ranks; None is the model axis.
        dim: The dimension that is divided.
        sizes: n of each rank; None asks the others, in a message more.

    Raises:
        ValueError: This rank's n is not what `sizes` says.
    """
    ranks = layer_group(group)
    if ranks.size == 1:
        return input_
    known = tuple(sizes_of_all(_size(input_, dim), ranks, sizes))
    return _gathered(ranks, input_, dim, known, sums=False)


def scatter_to_sequence_parallel_region(
    input_: Tensor, group: GroupLike = None, *, dim: int = -2, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part of the sequence; the gradients of the parts are put together.

    Args:
        input_: [..., N, ...], the same on all ranks.
        group: The ranks; None is the model axis.
        dim: The dimension of the sequence: by default that before the last, as in [batch, sequence, features].
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.
    """
    ranks = layer_group(group)
    tell_parts(ranks, parts_of(_size(input_, dim), ranks, sizes))
    return scatter_to_model_parallel_region(input_, ranks, dim=dim, sizes=sizes)


def gather_from_sequence_parallel_region(
    input_: Tensor, group: GroupLike = None, *, dim: int = -2, sizes: Sizes = None, to_model_parallel: bool = True
) -> Tensor:
    """Returns the whole sequence, of which each rank has a part.

    Args:
        input_: [..., n of this rank, ...].
        group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: n of each rank; None is as the sequence was divided, by one of these functions or by a layer.
        to_model_parallel: Whether each rank goes on with its own part of a layer, so that the gradients must be summed
            over the ranks. False is for what all ranks compute alike, such as a loss.

    Raises:
        ValueError: This rank's n is not what `sizes` says.
    """
    ranks = layer_group(group)
    if ranks.size == 1:
        return input_
    own = _size(input_, dim)
    known = parts_held(ranks, input_, dim) if sizes is None else tuple(sizes_of_all(own, ranks, sizes))
    return _sequence_gathered(ranks, input_, dim, known, sums=to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: GroupLike = None, *, dim: int = -2, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part of the sequence of the sum over the ranks; the gradients are put together.

    Args:
        input_: [..., N, ...]: a summand; of one shape on all ranks. It is not changed.
        group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.
    """
    ranks = layer_group(group)
    if ranks.size == 1:
        return input_
    known = tuple(parts_of(_size(input_, dim), ranks, sizes))
    tell_parts(ranks, known)
    part: Tensor = cross(_ReduceScatter, ranks, input_, dim, known)
    return part


@untraced
def _size(tensor: Tensor, dim: int) -> int:
    _check_tensor(tensor)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(
            f"expected dim to be one of the {tensor.dim()} dimensions of the input {list(tensor.shape)}, got {dim}: "
            "pass the one that is divided, such as dim=0"
        )
    return tensor.shape[dim]


def _check_tensor(given: object) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"expected a tensor to bring into the divided region or out of it, got {type(given).__name__}")


def _gathered(ranks: Group, part: Tensor, dim: int, sizes: tuple[int, ...], *, sums: bool) -> Tensor:
    from_last = dim % part.dim() - part.dim()  # Whoever finds it in the graph sees whether it is the last one.
    whole: Tensor = cross(_GatherToSum if sums else _Gather, ranks, part, from_last, sizes)
    return whole


@untraced
def _sequence_gathered(ranks: Group, part: Tensor, dim: int, sizes: tuple[int, ...], *, sums: bool) -> Tensor:
    return explained(lambda: _gathered(ranks, part, dim, sizes, sums=sums), ranks, part, dim, sizes)


# Each of these is another one's backward: see the table above.


class _Copy(Entering):
    @staticmethod
    def forward(ctx: Any, ranks: Group, tensor: Tensor) -> Tensor:
        ctx.ranks = ranks
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, cross(_Reduce, ctx.ranks, grad)


class _CopyAll(Entering):
    @staticmethod
    def forward(ctx: Any, ranks: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks = ranks
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [grad for grad, needed in zip(grads, ctx.needs_input_grad[1:], strict=True) if needed]
        joined: Tensor = cross(_Reduce, ctx.ranks, torch.cat([grad.reshape(-1) for grad in wanted]))
        sums = iter(joined.split([grad.numel() for grad in wanted]))
        return None, *(
            next(sums).view(grad.shape).to(grad.dtype) if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad[1:], strict=True)
        )


class _Reduce(Leaving):
    @staticmethod
    def forward(ctx: Any, ranks: Group, tensor: Tensor) -> Tensor:
        ctx.ranks = ranks
        return sum_over(tensor, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, cross(_Copy, ctx.ranks, grad)


class _Scatter(Entering):
    @staticmethod
    def forward(ctx: Any, ranks: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.place = (dim, sizes)
        ctx.ranks = ranks
        part = part_along(tensor, ranks, dim, sizes).clone(memory_format=torch.contiguous_format)
        return divides(ctx, part, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, cross(_Gather, ctx.ranks, grad, *ctx.place), None, None


class _Gather(Leaving):
    @staticmethod
    def forward(ctx: Any, ranks: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.place = (dim, sizes)
        ctx.ranks = ranks
        return gather_along(tensor, ranks, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, cross(_Scatter, ctx.ranks, grad, *ctx.place), None, None


class _GatherToSum(Entering):
    @staticmethod
    def forward(ctx: Any, ranks: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.place = (dim, sizes)
        ctx.ranks = ranks
        return gather_along(tensor, ranks, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, cross(_ReduceScatter, ctx.ranks, grad, *ctx.place), None, None


class _ReduceScatter(Leaving):
    @staticmethod
    def forward(ctx: Any, ranks: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.place = (dim, sizes)
        ctx.ranks = ranks
        return divides(ctx, sum_scatter_along(tensor, ranks, dim, sizes), dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, cross(_GatherToSum, ctx.ranks, grad, *ctx.place), None, None


# Parameters of which some ranks hold copies: the key-value heads where there are fewer of these than ranks.
#
# Each rank that holds a copy computes with other query heads, so each has a summand of its gradient. They add what the
# others have in rank order, so that the copies stay alike to the bit.


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


# All features out of the ranks' parts, and a part out of all, in the order of the layer that is not divided.
#
# A split may give a rank several ranges, as of matrices that are stacked. Then the parts, one behind the other, are in
# another order than the whole.


def gather_features(part: Tensor, group: Group, split: Split) -> Tensor:
    """Returns all features, in their order, of which each rank has those of a split.

    Args:
        part: [..., features of this rank].
        group: The ranks.
        split: Which features each rank has; of copies, the first counts, and gets the gradient.
    """
    if group.size == 1:
        return part
    gathered = gather_from_model_parallel_region(part, group, sizes=split.sizes)
    return gathered if split.is_in_rank_order else split.join(gathered.split(list(split.sizes), -1), -1)


def scatter_features(input_: Tensor, group: Group, split: Split) -> Tensor:
    """Returns the features that a split gives this rank.

    Args:
        input_: [..., all features], the same on all ranks.
        group: The ranks.
        split: Which features each rank has; no copies.
    """
    if not split.is_in_rank_order:
        input_ = torch.cat([split.take(input_, rank, -1) for rank in range(group.size)], -1)
    return scatter_to_model_parallel_region(input_, group, sizes=split.sizes)
