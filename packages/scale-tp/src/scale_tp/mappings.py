"""The collectives of tensor parallelism with their gradients: each is another one's backward.

| forward        | backward       | region                                       |
|----------------|----------------|----------------------------------------------|
| identity       | all-reduce     | `copy_to_tensor_model_parallel_region`       |
| all-reduce     | identity       | `reduce_from_tensor_model_parallel_region`   |
| local slice    | all-gather     | `scatter_to_tensor_model_parallel_region`    |
| all-gather     | local slice    | `gather_from_tensor_model_parallel_region`   |
| all-gather     | reduce-scatter | `gather_from_sequence_parallel_region`       |
| reduce-scatter | all-gather     | `reduce_scatter_to_sequence_parallel_region` |

A rank leaves a plain region, in which all ranks compute the same, through the first and the third, and comes back
through the second and the fourth. In a sequence parallel region each rank has its part of the sequence, and the last
two take the place of the first two. No tensor is changed in place, and gradients of gradients pass as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from scale_core.comm.group import Group, GroupLike
from scale_core.comm.layer_collectives import all_to_all
from scale_core.compat import untraced
from scale_core.errors import TransferError
from scale_core.hooks.autograd import in_backward
from scale_tp.comm import (
    accumulation_dtype,
    all_gather_along,
    all_reduce_sum,
    call_tag,
    check_sizes,
    gather_sizes,
    local_slice,
    reduce_scatter_along,
)
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.sequence_lengths import lengths_hint, record_lengths, shard_lengths
from scale_tp.split import Split

Sizes: TypeAlias = Sequence[int] | None


def copy_to_tensor_model_parallel_region(input_: Tensor, process_group: GroupLike = None) -> Tensor:
    """Returns the input as it is; its gradient is summed over the ranks, because each computes with its own part.

    Args:
        input_: [any shape], the same on all ranks.
        process_group: The ranks; None is the model axis.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import copy_to_tensor_model_parallel_region
        >>> copy_to_tensor_model_parallel_region(torch.ones(2, 3)).shape
        torch.Size([2, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return copy_to_region(_check_tensor(input_), tensor_parallel_group(process_group))


def copy_many_to_tensor_model_parallel_region(*inputs: Tensor, process_group: GroupLike = None) -> tuple[Tensor, ...]:
    """The same for several tensors, whose gradients are summed in one message: the small parameters of a norm.

    Args:
        *inputs: [any shapes] of one dtype and device, the same on all ranks.
        process_group: The ranks; None is the model axis.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_tp.mappings import copy_many_to_tensor_model_parallel_region
        >>> first, second = copy_many_to_tensor_model_parallel_region([torch.ones(2), torch.ones(3)], Group())

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return copy_many_to_region(inputs, tensor_parallel_group(process_group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, process_group: GroupLike = None) -> Tensor:
    """Returns the sum over the ranks; the gradient goes to each summand as it is.

    Args:
        input_: [any shape]: a summand; of one shape on all ranks. It is not changed.
        process_group: The ranks; None is the model axis.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import reduce_from_tensor_model_parallel_region
        >>> reduce_from_tensor_model_parallel_region(torch.ones(2, 3)).sum()  # on two ranks 12
        tensor(6.)

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return reduce_from_region(_check_tensor(input_), tensor_parallel_group(process_group))


def scatter_to_tensor_model_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -1, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part along `dim`; the gradients of the parts are put together.

    Args:
        input_: [..., N, ...], the same on all ranks.
        process_group: The ranks; None is the model axis.
        dim: The dimension that is divided.
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import scatter_to_tensor_model_parallel_region
        >>> scatter_to_tensor_model_parallel_region(torch.ones(2, 6)).shape  # on two ranks [2, 3]
        torch.Size([2, 6])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return scatter_to_region(_check_tensor(input_, dim), tensor_parallel_group(process_group), dim, sizes)


def gather_from_tensor_model_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -1, sizes: Sizes = None
) -> Tensor:
    """Returns the parts of all ranks along `dim`, in rank order; each gets its part of the gradient.

    Args:
        input_: [..., n of this rank, ...].
        process_group: The ranks; None is the model axis.
        dim: The dimension that is divided.
        sizes: n of each rank; None asks the others, in a message more.

    Raises:
        ValueError: This rank's n differs from `sizes`.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import gather_from_tensor_model_parallel_region
        >>> gather_from_tensor_model_parallel_region(torch.ones(2, 3)).shape  # on two ranks [2, 6]
        torch.Size([2, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return gather_from_region(_check_tensor(input_, dim), tensor_parallel_group(process_group), dim, sizes)


def scatter_to_sequence_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -2, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part of the sequence; the gradients of the parts are put together.

    Args:
        input_: [..., N, ...], the same on all ranks.
        process_group: The ranks; None is the model axis.
        dim: The dimension of the sequence: by default that before the last, as in [batch, sequence, features].
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import scatter_to_sequence_parallel_region
        >>> scatter_to_sequence_parallel_region(torch.ones(2, 6, 3)).shape  # on two ranks [2, 3, 3]
        torch.Size([2, 6, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ranks = tensor_parallel_group(process_group)
    lengths = check_sizes(_check_tensor(input_, dim).shape[dim], ranks, sizes)
    record_lengths(ranks, lengths)
    return scatter_to_region(input_, ranks, dim, lengths)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    process_group: GroupLike = None,
    *,
    dim: int = -2,
    sizes: Sizes = None,
    to_model_parallel: bool = True,
) -> Tensor:
    """Returns the full sequence from the ranks' parts.

    Args:
        input_: [..., n of this rank, ...].
        process_group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: n of each rank; None is as the sequence was divided, by one of these functions or by a layer.
        to_model_parallel: Whether each rank goes on with its own part of a layer, so that the gradients must be summed
            over the ranks. False is for a result that is the same on all ranks, for example a loss.

    Raises:
        ValueError: This rank's n differs from `sizes`.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import gather_from_sequence_parallel_region
        >>> gather_from_sequence_parallel_region(torch.ones(2, 5, 3)).shape  # on two ranks [2, 10, 3]
        torch.Size([2, 5, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    ranks = tensor_parallel_group(process_group)
    return gather_sequence(_check_tensor(input_, dim), ranks, dim, sizes, to_model_parallel=to_model_parallel)


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, process_group: GroupLike = None, *, dim: int = -2, sizes: Sizes = None
) -> Tensor:
    """Returns this rank's part of the sequence of the sum over the ranks; the gradients are put together.

    Args:
        input_: [..., N, ...]: a summand; of one shape on all ranks. It is not changed.
        process_group: The ranks; None is the model axis.
        dim: The dimension of the sequence.
        sizes: How much of N each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.

    Examples:
        >>> import torch
        >>> from scale_tp.mappings import reduce_scatter_to_sequence_parallel_region
        >>> reduce_scatter_to_sequence_parallel_region(torch.ones(2, 6, 3)).shape  # on two ranks [2, 3, 3]
        torch.Size([2, 6, 3])

    See also: [the guide to tensor parallel](../guides/tensor-parallel.md).
    """
    return reduce_scatter_sequence(_check_tensor(input_, dim), tensor_parallel_group(process_group), dim, sizes)


def _check_tensor(given: Tensor, dim: int | None = None) -> Tensor:
    is_tensor: bool = isinstance(given, Tensor)
    if not is_tensor:
        raise TypeError(f"expected a tensor to bring into the divided region or out of it, got {type(given).__name__}")
    if dim is not None and not -given.dim() <= dim < given.dim():
        raise ValueError(
            f"expected dim to be one of the {given.dim()} dimensions of the input {list(given.shape)}, got {dim}: "
            "pass the one that is divided, such as dim=0"
        )
    return given


# For the layers, which know their group and have checked their input. torch.compile goes on without a graph here.


@untraced
def copy_to_region(input: Tensor, group: Group) -> Tensor:
    """Identity, with an all-reduce of the gradient."""
    if group.size == 1:
        return input
    output: Tensor = apply(_Copy, group, input)
    return output


@untraced
def copy_many_to_region(inputs: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """Identity of several tensors, with one all-reduce of all their gradients."""
    if group.size == 1 or not inputs:
        return tuple(inputs)
    outputs: tuple[Tensor, ...] = apply(_CopyMany, group, *inputs)
    return outputs


@untraced
def reduce_from_region(input: Tensor, group: Group) -> Tensor:
    """All-reduce, with the identity of the gradient."""
    if group.size == 1:
        return input
    output: Tensor = apply(_Reduce, group, input)
    return output


@untraced
def scatter_to_region(input: Tensor, group: Group, dim: int = -1, sizes: Sizes = None) -> Tensor:
    """Local slice, with an all-gather of the gradient."""
    if group.size == 1:
        return input
    output: Tensor = apply(_Scatter, group, input, dim, tuple(check_sizes(input.shape[dim], group, sizes)))
    return output


@untraced
def gather_from_region(input: Tensor, group: Group, dim: int = -1, sizes: Sizes = None) -> Tensor:
    """All-gather, with the local slice of the gradient."""
    if group.size == 1:
        return input
    output: Tensor = apply(_Gather, group, input, dim, tuple(gather_sizes(input.shape[dim], group, sizes)))
    return output


@untraced
def gather_sequence(
    input: Tensor, group: Group, dim: int, sizes: Sizes = None, *, to_model_parallel: bool = True
) -> Tensor:
    """All-gather of a sequence, with a reduce-scatter of the gradient, or a local slice."""
    if group.size == 1:
        return input
    local_length = input.shape[dim]
    lengths = shard_lengths(group, input, dim) if sizes is None else tuple(gather_sizes(local_length, group, sizes))
    try:
        output: Tensor = apply(_GatherSequence if to_model_parallel else _Gather, group, input, dim, lengths)
        return output
    except TransferError as error:
        error.add_note(lengths_hint(group.rank, local_length))
        raise


@untraced
def reduce_scatter_sequence(input: Tensor, group: Group, dim: int, sizes: Sizes = None) -> Tensor:
    """Reduce-scatter of a sequence, with an all-gather of the gradient."""
    if group.size == 1:
        return input
    lengths = tuple(check_sizes(input.shape[dim], group, sizes))
    record_lengths(group, lengths)
    output: Tensor = apply(_ReduceScatter, group, input, dim, lengths)
    return output


# Autograd remembers the ranks of a region, as `ctx.group`.


class RegionEntry(torch.autograd.Function):
    """Base of the functions that bring a tensor into the region of the ranks `ctx.group`."""


class RegionExit(torch.autograd.Function):
    """Base of the functions that bring a tensor out of it."""


def region_groups(tensor: Tensor) -> list[Group]:
    """Returns the ranks of the regions that a tensor was computed in, back to where each was entered; mostly one."""
    groups: dict[Group, None] = {}
    seen: set[Any] = set()
    stack: list[Any] = [tensor.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", object)
        if issubclass(function, RegionEntry):
            groups[node.group] = None
        elif not issubclass(function, RegionExit):
            stack += [before for before, _ in node.next_functions]
    return list(groups)


@untraced
def check_in_region(what: str, tensor: Tensor, group: Group) -> bool:
    """Refuses a tensor that was never brought into the region, so that its gradient would not be summed.

    Returns whether it is known to be inside: one that needs no gradient, or is computed again, may be anything.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return False
    if any(ranks.ranks == group.ranks for ranks in region_groups(tensor)):
        return True
    if tensor.grad_fn is None and in_backward():
        return False
    raise ValueError(
        f"{what}: input_is_inside=True, but the input {list(tensor.shape)} was not brought into the region of "
        f"{list(group.ranks)}: pass scale_tp.megatron.copy_to_tensor_model_parallel_region(input, group), or leave it "
        "out"
    )


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)


# Each of these is another one's backward: see the table above.


class _Copy(RegionEntry):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Tensor:
        ctx.group = group
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, apply(_Reduce, ctx.group, grad)


class _CopyMany(RegionEntry):
    @staticmethod
    def forward(ctx: Any, group: Group, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed_grads = [grad for grad, needed in zip(grads, ctx.needs_input_grad[1:], strict=True) if needed]
        joined: Tensor = apply(_Reduce, ctx.group, torch.cat([grad.reshape(-1) for grad in needed_grads]))
        sums = iter(joined.split([grad.numel() for grad in needed_grads]))
        return None, *(
            next(sums).view(grad.shape).to(grad.dtype) if needed else None
            for grad, needed in zip(grads, ctx.needs_input_grad[1:], strict=True)
        )


class _Reduce(RegionExit):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor) -> Tensor:
        ctx.group = group
        return all_reduce_sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, apply(_Copy, ctx.group, grad)


class _Scatter(RegionEntry):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return local_slice(tensor, group, dim, sizes).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, apply(_Gather, ctx.group, grad, ctx.dim, ctx.sizes), None, None


class _Gather(RegionExit):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return all_gather_along(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, apply(_Scatter, ctx.group, grad, ctx.dim, ctx.sizes), None, None


class _GatherSequence(RegionEntry):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return all_gather_along(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, apply(_ReduceScatter, ctx.group, grad, ctx.dim, ctx.sizes), None, None


class _ReduceScatter(RegionExit):
    @staticmethod
    def forward(ctx: Any, group: Group, tensor: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        return reduce_scatter_along(tensor, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, None]:
        return None, apply(_GatherSequence, ctx.group, grad, ctx.dim, ctx.sizes), None, None


# Features in the order of the layer that is not divided: a split may give a rank several ranges, as of matrices that
# are stacked, so that the parts one behind the other are in another order than the full tensor.


def gather_features(part: Tensor, group: Group, split: Split) -> Tensor:
    """Gathers [..., features of this rank] of a split; of copies, the first counts and gets the gradient."""
    if group.size == 1:
        return part
    gathered = gather_from_region(part, group, -1, split.sizes)
    return gathered if split.is_in_rank_order else split.join(gathered.split(list(split.sizes), -1), -1)


def scatter_features(input: Tensor, group: Group, split: Split) -> Tensor:
    """Returns the features that a split without copies gives this rank, of [..., all features]."""
    if not split.is_in_rank_order:
        input = torch.cat([split.take(input, rank, -1) for rank in range(group.size)], -1)
    return scatter_to_region(input, group, -1, split.sizes)


# Parameters that some ranks hold copies of: key-value heads where there are fewer of them than ranks. Each rank with a
# copy computes with other query heads, so each has a summand of the gradient. They add in rank order, so that copies
# stay equal to the bit.


def reduce_grads_of_copies(param: Tensor, group: Group, split: Split) -> Tensor:
    """Identity of a parameter, with an all-reduce of its gradient over the ranks that hold a copy."""
    if group.size == 1 or not split.has_copies:
        return param
    holders = [rank for rank, ranges in enumerate(split.ranges) if ranges == split.ranges[group.rank]]
    summed: Tensor = apply(_ReduceCopies, param, group, holders)
    return summed


class _ReduceCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, param: Tensor, group: Group, holders: list[int]) -> Tensor:
        ctx.group, ctx.holders = group, holders
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_reduce_copies(grad, ctx.group, ctx.holders), None, None


def all_reduce_copies(tensor: Tensor, group: Group, holders: list[int]) -> Tensor:
    """Returns the sum over some ranks of the group, each with its own; all ranks of the group call it."""
    flat = tensor.contiguous().view(-1)
    others = [rank for rank in holders if rank != group.rank]
    sizes = [flat.numel() if rank in others else 0 for rank in range(group.size)]
    received, sent = flat.new_empty(sum(sizes)), flat.repeat(len(others))
    tag = call_tag("gradients of copies", flat.dtype, tuple(tensor.shape))
    all_to_all(received, sent, group, output_sizes=sizes, input_sizes=sizes, tag=tag).wait()
    parts = dict(zip(others, received.split(flat.numel()) if others else (), strict=True))
    parts[group.rank] = flat
    total = torch.zeros(flat.shape, dtype=accumulation_dtype(flat.dtype), device=flat.device)
    for rank in sorted(parts):
        total += parts[rank]
    return total.to(tensor.dtype).view(tensor.shape)
