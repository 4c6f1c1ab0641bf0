"""Products of rows with the weights of their experts: a linear layer per segment of the rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scale_core import compat
from scale_core.device.streams import tensor_on
from scale_core.shard import on_local_tensors
from scale_core.sharded_tensor.tensor import local_tensor


def grouped_linear(rows: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Returns row @ weight[e].T for the rows of each expert e, as E linear layers would, one after the other.

    `torch._grouped_mm` computes it where torch has it for the device and dtype, else a product per expert. Both give
    the same bits on a CPU. The weight's gradient is written once, where indexing by expert would add E full ones.

    Args:
        rows: [R, in], by expert.
        weight: [E, out, in].
        counts: How many of the rows each expert has.

    Returns:
        [R, out]; under autocast in its dtype.

    Raises:
        ValueError: The counts do not match the experts, or do not add up to the rows.

    Examples:
        >>> import torch
        >>> from scale_moe.grouped_linear import grouped_linear
        >>> rows, weight = torch.ones(3, 4), torch.ones(2, 5, 4)
        >>> grouped_linear(rows, weight, [1, 2]).shape  # one row for expert 0, two for expert 1
        torch.Size([3, 5])

    See also: [the guide to experts](../guides/experts.md).
    """
    if len(counts) != len(weight) or sum(counts) != len(rows) or min(counts, default=0) < 0:
        raise ValueError(
            f"expected counts of {len(weight)} experts, as many as have weights here, that add up to {len(rows)} rows, "
            f"got {list(counts)}, which add up to {sum(counts)}: give plan.counts of plan_dispatch"
        )
    kind = rows.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        rows, weight = rows.to(dtype), weight.to(dtype)
    return cast(Tensor, _GroupedLinear.apply(rows, weight, tuple(counts)))  # type: ignore[no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, local_tensor(weight))
        # Also in a simulation, which books it.
        ctx.ends = tensor_on(rows.device, list(itertools.accumulate(counts)), torch.int32) if len(rows) else None
        ctx.counts = counts
        return _by_expert(rows, weight.transpose(1, 2), counts, ctx.ends)

    @staticmethod
    @once_differentiable
    @on_local_tensors
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weight = ctx.saved_tensors
        grad_rows = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_rows = _by_expert(grad, weight, ctx.counts, ctx.ends)
        if ctx.needs_input_grad[1]:
            grad_weight = _weight_gradients(grad, rows, weight, ctx.counts, ctx.ends)
        return grad_rows, grad_weight, None


def _by_expert(rows: Tensor, weight: Tensor, counts: tuple[int, ...], ends: Tensor | None) -> Tensor:
    """[R, in] x [E, in, out] -> [R, out]; `ends` [E] int32 are the rows past the last of each expert."""
    if ends is not None and _can_group(rows, weight):
        return torch._grouped_mm(rows, weight, offs=ends)
    output = rows.new_empty(len(rows), weight.shape[2])
    for expert, first, last in _segments(counts, rows):
        if last > first:
            torch.mm(rows[first:last], weight[expert], out=output[first:last])
    return output


def _weight_gradients(
    grad: Tensor, rows: Tensor, weight: Tensor, counts: tuple[int, ...], ends: Tensor | None
) -> Tensor:
    """[R, out] x [R, in] -> [E, out, in], over the rows of each expert."""
    if ends is not None and _can_group_rows(grad, rows):
        grouped = torch._grouped_mm(grad.t(), rows, offs=ends)
        for expert, count in enumerate(counts):
            if not count:  # torch does not specify a sum over no rows.
                grouped[expert].zero_()
        return grouped
    output = torch.empty_like(weight, memory_format=torch.contiguous_format)
    for expert, first, last in _segments(counts, rows):
        torch.mm(grad[first:last].t(), rows[first:last], out=output[expert])
    return output


def _segments(counts: Sequence[int], rows: Tensor) -> list[tuple[int, int, int]]:
    """Each expert with its first row and one past its last; in a simulation one of them has all rows."""
    if compat.is_fake(rows):  # As many bytes, without values: no need of a product for each of 256 experts.
        return [(0, 0, len(rows))] if counts else []
    ends = list(itertools.accumulate(counts))
    return [(expert, end - count, end) for expert, (end, count) in enumerate(zip(ends, counts, strict=True))]


def _can_group(rows: Tensor, weight: Tensor) -> bool:
    if compat.is_fake(rows) or rows.dtype != weight.dtype:
        return False
    # Kernels read 16 bytes at once: rows of other lengths, or memory that begins elsewhere, are refused.
    sizes = [size * rows.element_size() for size in weight.shape[1:]]
    is_dense = rows.is_contiguous() and (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous())
    begins = [rows.data_ptr(), weight.data_ptr()]
    is_aligned = is_dense and all(number % 16 == 0 for number in (*sizes, *begins))
    return is_aligned and _has_kernel(rows.device.type, rows.dtype)


def _can_group_rows(grad: Tensor, rows: Tensor) -> bool:
    if compat.is_fake(rows) or rows.dtype != grad.dtype or not (grad.is_contiguous() and rows.is_contiguous()):
        return False
    sizes = [tensor.shape[1] * tensor.element_size() for tensor in (grad, rows)]
    is_aligned = all(number % 16 == 0 for number in (*sizes, grad.data_ptr(), rows.data_ptr()))
    return is_aligned and _has_row_kernel(rows.device.type, rows.dtype)


@cache
def _has_row_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch has grouped products that sum over rows, for a device and dtype: it is tried once."""
    try:
        rows = torch.ones(16, 16, dtype=dtype, device=device)
        ends = torch.tensor([4, 16], dtype=torch.int32, device=device)
        products = torch._grouped_mm(rows.t(), rows, offs=ends)
        return bool((products[0] == 4).all()) and bool((products[1] == 12).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False


@cache
def _has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether this torch has grouped products for a device and dtype: it is tried once."""
    try:
        rows, weight = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(2, 16, 16, dtype=dtype, device=device)
        ends = torch.tensor([4, 16], dtype=torch.int32, device=device)
        return bool((torch._grouped_mm(rows, weight, offs=ends) == 16).all())
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
