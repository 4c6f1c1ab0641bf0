"""Reductions of a sharded tensor, with the results of the full one: over all dimensions or some, equal on all ranks.

Each rank reduces its own elements, the ranks exchange their results, and each one combines it in the order of
the ranks. So a result is a plain tensor with the same bits on all ranks; it is on every rank that calls the function,
and all ranks that share the tensor call it together. Sums differ from the sums of one process
by the order of their summands only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather
from scale_core.comm.group import Group
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.errors import ShardedTensorError, TransferError
from scale_core.shard import Shard
from scale_core.sharded_tensor.elements import box_of, local_part

Combine = Callable[[Tensor], Tensor]  # [W, ...], by rank, to [...]
Dims = tuple[int, ...] | None


class Sharded(NamedTuple):
    """A sharded tensor, taken apart."""

    local: Tensor  # This rank's elements
    shard: Shard


def reduce_over_ranks(value: Tensor, shard: Shard, combine: Combine, what: str) -> Tensor:
    """Combines a tensor of one shape from all ranks that share `shard`; `what` names the function in errors."""
    for group in shard.divided_groups:
        value = combine(gather_values(value, group, f"{what} of {shard.title}"))
    return value


def gather_values(value: Tensor, group: Group, what: str) -> Tensor:
    """Returns [W, ...], a tensor of each rank of a group, in their order."""
    sent = value.detach().contiguous()
    flat = (sent.to(torch.uint8) if sent.dtype is torch.bool else sent).reshape(-1)
    if group.process_group is None or group.backend == "fake" or value.is_meta:  # No other rank is there.
        # All are taken to have the same.
        return sent.expand(group.size, *sent.shape)
    gathered = flat.new_empty(group.size * flat.numel())
    if flat.numel():
        try:
            all_gather(gathered, flat, group, tag=message_tag(Event(what, ""))).wait()
        except TransferError as error:
            error.add_note(
                f"{what} needs the elements of all of the ranks {list(group.ranks)}, because each has a part of them: "
                "call it on all of these ranks, in the same order, or compute with this rank's part, to_local()"
            )
            raise
    return gathered.view(group.size, *sent.shape).to(sent.dtype)


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks; each summand has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, shard: Shard, what: str) -> Tensor:
        result = reduce_over_ranks(value, shard, lambda values: values.sum(0), what)
        return result if result is not value else value.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class _WithoutGradient(torch.autograd.Function):
    """A reduction that programs read and do not train with, for example a maximum: its backward is an error."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, shard: Shard, what: str, combine: Combine) -> Tensor:
        ctx.title = f"{what} of {shard.title}"
        return reduce_over_ranks(value, shard, combine, what).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ShardedTensorError(
            f"{ctx.title} has no gradient, because its elements are divided between ranks. Write it with sums, for "
            "example of powers, or compute it from full tensors inside the model"
        )


def part_of(full: Tensor, shard: Shard, shape: torch.Size, what: str) -> Tensor:
    """Returns this rank's elements of a tensor that each rank has, and that broadcasts to the full shape.

    `shape` is the local one; without dimensions it stands for a tensor of one element. The gradient of `full` is summed
    over the ranks; each adds the result of its own elements.
    """
    if torch.is_grad_enabled() and full.requires_grad:
        part: Tensor = _PartOf.apply(full, shard, shape, what)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return part
    part = local_part(full, shard) if shape else full
    return part if part.shape == shape else part.reshape(shape)


class _PartOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, shard: Shard, shape: torch.Size, what: str) -> Tensor:
        ctx.save_for_backward(full.new_empty(0))
        ctx.full_shape, ctx.shard, ctx.what = full.shape, shard, f"the gradient of {what}"
        return part_of(full.detach(), shard, shape, what).clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (like,), shard = grads, ctx.saved_tensors, ctx.shard
        with torch.enable_grad():
            full = like.new_zeros(ctx.full_shape).requires_grad_()
            part = (local_part(full, shard) if grad.dim() else full).reshape(grad.shape)
        if not shard.counted or not part.requires_grad:  # Another rank counts these elements, or there are none.
            full_grad = torch.zeros_like(full)
        else:
            (full_grad,) = torch.autograd.grad(part, full, grad)
        return reduce_over_ranks(full_grad, shard, lambda values: values.sum(0), ctx.what), None, None, None


class RankReduction(NamedTuple):
    """One kind of reduction: the local function, its value for no elements, and the combination of ranks."""

    of_local: Callable[[Tensor, Dims], Tensor]  # Keeps the dimensions
    neutral: float | bool
    combine: Combine
    is_sum: bool = False


def reduce(reduction: RankReduction, tensor: Sharded, dims: Dims, keepdim: bool, what: str) -> Tensor:
    """Reduces over dimensions, None is all: the result of the full tensor, on all ranks."""
    local, shard = tensor
    rank_dims = len(shard.shape)
    if dims is not None:
        for dim in dims:
            if not -max(rank_dims, 1) <= dim < max(rank_dims, 1):
                raise IndexError(f"{what}: expected a dimension of {tuple(shard.shape)}, got {dim}")
        dims = tuple(sorted(dim % max(rank_dims, 1) for dim in dims))
    covers_all = not dims or len(set(dims)) == rank_dims
    if covers_all or not rank_dims:
        value = _reduce_all(reduction, local, shard)
    else:
        assert dims is not None
        value = _reduce_some(reduction, local, shard, dims)
    if torch.is_grad_enabled() and local.requires_grad and (value.is_floating_point() or value.is_complex()):
        if not value.requires_grad:  # A rank without elements has the same graph as the others.
            value = value + local.reshape(-1)[:0].sum().to(value.dtype)
        call: Any = _SumOverRanks.apply if reduction.is_sum else _WithoutGradient.apply
        result: Tensor = call(value, shard, what, *(() if reduction.is_sum else (reduction.combine,)))
    else:
        result = reduce_over_ranks(value, shard, reduction.combine, what)
    if covers_all:
        return result.reshape((1,) * rank_dims if keepdim else ())
    assert dims is not None
    return result if keepdim else result.reshape([size for dim, size in enumerate(result.shape) if dim not in dims])


def _reduce_all(reduction: RankReduction, local: Tensor, shard: Shard) -> Tensor:
    if not shard.counted:  # Another rank has the same elements, and counts them.
        return reduction.of_local(local.new_full((1,), reduction.neutral), None).reshape(())
    flat = local.reshape(-1)
    return reduction.of_local(flat if flat.numel() else flat.new_full((1,), reduction.neutral), None).reshape(())


def _reduce_some(reduction: RankReduction, local: Tensor, shard: Shard, dims: tuple[int, ...]) -> Tensor:
    box, indices = box_of(local, shard, reduction.neutral)
    sizes = tuple(1 if dim in dims else size for dim, size in enumerate(shard.shape))
    if not box.numel() or not shard.counted:
        empty = reduction.of_local(local.new_full((1,) * len(sizes), reduction.neutral), dims)
        return empty.expand(sizes)
    part = reduction.of_local(box, dims)
    for dim, index in enumerate(indices):
        if index is not None and dim not in dims:
            filler = torch.full((), reduction.neutral, dtype=local.dtype, device=local.device)
            neutral = reduction.of_local(filler.reshape((1,) * part.dim()), dims)
            shape = (*part.shape[:dim], shard.shape[dim], *part.shape[dim + 1 :])
            part = neutral.expand(shape).index_copy(dim, index, part)
    return part


# Which reductions there are. Values in half precision are added up in fp32, as torch does inside of one sum.


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are added up."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_of(dtype: torch.dtype | None) -> RankReduction:
    """Sums, in a dtype."""

    def of_local(part: Tensor, dims: Dims) -> Tensor:
        return part.sum(dims if dims is not None else [], keepdim=dims is not None, dtype=dtype)

    return RankReduction(of_local, 0, lambda values: values.sum(0, dtype=values.dtype), is_sum=True)


def _extreme(name: str) -> Callable[[torch.dtype], RankReduction]:
    largest = name == "amax"

    def make(dtype: torch.dtype) -> RankReduction:
        def of_local(part: Tensor, dims: Dims) -> Tensor:
            reduced: Tensor = getattr(part, name)(dims if dims is not None else (), keepdim=dims is not None)
            return reduced

        if dtype is torch.bool:
            neutral: float | bool = not largest
        elif dtype.is_floating_point:
            neutral = -math.inf if largest else math.inf
        else:
            limits = torch.iinfo(dtype)
            neutral = limits.min if largest else limits.max
        return RankReduction(of_local, neutral, lambda values: getattr(values, name)(0))

    return make


largest_of, smallest_of = _extreme("amax"), _extreme("amin")


def _over_dims(part: Tensor, dims: Dims, name: str) -> Tensor:
    """Applies a method of torch that takes one dimension to several."""
    if dims is None:
        reduced: Tensor = getattr(part, name)()
        return reduced
    for dim in dims:
        part = getattr(part, name)(dim, keepdim=True)
    return part


ANY = RankReduction(lambda part, dims: _over_dims(part.bool(), dims, "any"), False, lambda values: values.any(0))
ALL = RankReduction(lambda part, dims: _over_dims(part.bool(), dims, "all"), True, lambda values: values.all(0))


def norm(tensor: Sharded, order: float, dims: Dims, keepdim: bool, dtype: torch.dtype | None, what: str) -> Tensor:
    """The vector norm of an order, as `torch.linalg.vector_norm`."""
    local, shard = tensor
    local = local if dtype is None else local.to(dtype)
    magnitude = local.abs()
    result_dtype = magnitude.dtype
    if not result_dtype.is_floating_point:
        raise ShardedTensorError(f"{what} of {shard.title}: expected a floating-point tensor, got {local.dtype}")
    if order == math.inf:
        return reduce(largest_of(result_dtype)._replace(neutral=0), Sharded(magnitude, shard), dims, keepdim, what)
    if order == -math.inf:
        return reduce(smallest_of(result_dtype), Sharded(magnitude, shard), dims, keepdim, what)
    if order == 0:
        nonzero = (magnitude != 0).to(result_dtype)
        return reduce(sum_of(None), Sharded(nonzero, shard), dims, keepdim, what)
    if torch.is_grad_enabled() and local.requires_grad:
        powers = reduce(sum_of(None), Sharded(magnitude.double() ** order, shard), dims, keepdim, what)
    else:
        powers = reduce(_powers_of(order), Sharded(magnitude, shard), dims, keepdim, what)
    return power_of(powers, 1 / order).to(result_dtype)


def power_of(value: Tensor, exponent: float) -> Tensor:
    """A power whose derivative at 0 is 0, as torch's norms and standard deviations have it."""
    if not value.requires_grad:
        return value**exponent
    is_zero = value == 0
    return torch.where(is_zero, value, torch.where(is_zero, 1, value) ** exponent)


def _powers_of(order: float) -> RankReduction:
    """Sums of powers of magnitudes, in fp64."""

    def of_local(part: Tensor, dims: Dims) -> Tensor:
        reduced: Tensor = torch.linalg.vector_norm(part, order, dims, keepdim=dims is not None, dtype=torch.float64)
        return reduced**order

    return RankReduction(of_local, 0 if order > 0 else math.inf, lambda values: values.sum(0))


def count(shard: Shard, dims: Dims) -> int:
    """How many elements of the full tensor are reduced to one."""
    if not dims:
        return shard.numel
    return math.prod(shard.shape[dim] for dim in {dim % len(shard.shape) for dim in dims}) if shard.shape else 1


def mean(tensor: Sharded, dims: Dims, keepdim: bool, dtype: torch.dtype | None, what: str) -> Tensor:
    """The mean over dimensions."""
    local, shard = tensor
    result_dtype = dtype or local.dtype
    if not (result_dtype.is_floating_point or result_dtype.is_complex):
        raise ShardedTensorError(f"{what} of {shard.title}: expected a floating-point tensor, got {local.dtype}")
    total = reduce(sum_of(wide(result_dtype)), tensor, dims, keepdim, what)
    return (total / count(shard, dims)).to(result_dtype)


def variance(tensor: Sharded, dims: Dims, keepdim: bool, correction: float, what: str) -> tuple[Tensor, Tensor]:
    """The variance and the mean over dimensions, in two passes."""
    local, shard = tensor
    center = mean(tensor, dims, True, wide(local.dtype), what)
    part = local_part(center, shard)
    deviation = local.to(wide(local.dtype)) - (part if part.dim() == 0 else part.reshape(local.shape))
    squares = deviation.abs().square()
    total = reduce(sum_of(None), Sharded(squares, shard), dims, keepdim, what)
    result = total / max(0.0, count(shard, dims) - correction)
    if not keepdim:
        center = center.reshape(total.shape)
    return result.to(squares.dtype if local.dtype == wide(local.dtype) else local.dtype), center.to(local.dtype)


def batched(values: Sequence[Tensor], shards: Sequence[Shard], combine: Combine, what: str) -> list[Tensor]:
    """Combines numbers of many sharded tensors: one message for all that the same ranks share."""
    results = list(values)
    by_groups: dict[tuple[Group, ...], list[int]] = {}
    for number, shard in enumerate(shards):
        groups = shard.divided_groups
        by_groups.setdefault(groups, []).append(number)
    for groups, numbers in by_groups.items():
        stacked = torch.stack([results[number] for number in numbers])
        for group in groups:
            stacked = combine(
                gather_values(stacked, group, f"{what} of {shards[numbers[0]].title} and {len(numbers) - 1} more")
            )
        for number, value in zip(numbers, stacked.unbind(), strict=True):
            results[number] = value
    return results
