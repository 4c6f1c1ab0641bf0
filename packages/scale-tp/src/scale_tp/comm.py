"""Collectives of tensor parallelism along any dimension of a tensor, and the same with their gradients.

No argument is written to. Summands are added in rank order, half precision in fp32, and rounded once, so that
one process can compute the same number to the bit. On CUDA the order, and for half precision the rounding, are NCCL's.
Each `start_...` returns a `PendingTensor`, so that something can be computed until it is waited for.

Each mapping between regions is the backward of another one:

| forward        | backward       | mapping                   |
|----------------|----------------|---------------------------|
| identity       | all-reduce     | `copy_to_region`          |
| all-reduce     | identity       | `reduce_from_region`      |
| local slice    | all-gather     | `scatter_to_region`       |
| all-gather     | local slice    | `gather_from_region`      |
| all-gather     | reduce-scatter | `gather_sequence`         |
| reduce-scatter | all-gather     | `reduce_scatter_sequence` |

A rank leaves a plain region, in which all ranks compute the same, through the first and the third, and comes back
through the second and the fourth. In a sequence parallel region each rank has its part of the sequence, and the last
two take the place of the first two. No tensor is changed in place, and gradients of gradients pass as well.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.profiler import record_function

from scale_core.comm.collectives import UNIT_TAGS, all_gather, exchange, fingerprint_of, peer_to_peer, reduce_scatter
from scale_core.comm.group import Group
from scale_core.comm.rank_order_sum import all_reduce_in_rank_order
from scale_core.comm.work import CollectiveWork
from scale_core.compat import NO_RANGE, profiler_runs, untraced
from scale_core.errors import TransferError
from scale_tp.failed_pass import add_explanation
from scale_tp.sequence_lengths import lengths_hint, record_lengths, shard_lengths
from scale_tp.split import Split, even_sizes

Sizes: TypeAlias = Sequence[int] | None


@functools.lru_cache(maxsize=4096)
def call_tag(*key: object) -> int:
    """Returns a message tag made of the facts that must be equal on sender and receiver: purpose, dtype, shapes.

    Example:
        >>> call_tag("sum", "fp32", (2, 3)) == call_tag("sum", "fp32", (2, 3))
        True
    """
    return UNIT_TAGS[fingerprint_of(*key) % len(UNIT_TAGS)]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to add in: fp32 for half precision, every other dtype itself.

    Example:
        >>> accumulation_dtype(torch.bfloat16), accumulation_dtype(torch.float64), accumulation_dtype(torch.int64)
        (torch.float32, torch.float64, torch.int64)
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def to_accumulation_dtype(tensor: Tensor) -> Tensor:
    """Converts a tensor to its accumulation dtype."""
    return tensor.to(accumulation_dtype(tensor.dtype))


def sum_in_rank_order(summands: Sequence[Tensor] | Tensor) -> Tensor:
    """Adds two tensors or more in their order, in fp32 at least, and rounds once."""
    total = to_accumulation_dtype(summands[0]) + to_accumulation_dtype(summands[1])
    for summand in summands[2:]:
        total += summand
    return total.to(summands[0].dtype)


_COLLECTIVES = {"a sum": "all_reduce", "a gathering": "all_gather", "a sum by parts": "reduce_scatter"}


class PendingTensor(NamedTuple):
    """A tensor that is being communicated: the collective, and the function that turns its result into it."""

    op: str  # for example "a sum", for the error
    tensor: Tensor  # this rank's input
    group: Group
    work: CollectiveWork
    finish: Callable[[Tensor], Tensor] | None = None

    @property
    def _title(self) -> str:
        """Its name in the trace of a profiler."""
        return f"scale_tp::{_COLLECTIVES.get(self.op, self.op)} {list(self.tensor.shape)}"

    def wait(self) -> Tensor:
        """Returns the tensor; a `TransferError` names the operation."""
        try:
            with record_function(self._title) if profiler_runs() else NO_RANGE:
                result = self.work.wait()
            return result if self.finish is None else self.finish(result)
        except TransferError as error:
            error.add_note(
                f"in {self.op} of {list(self.tensor.shape)} {self.tensor.dtype} over the ranks "
                f"{list(self.group.ranks)}: all of them have to call the same layers in the same order, with inputs "
                "of one shape and dtype"
            )
            add_explanation(error, self.group)
            raise


def all_reduce_sum(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum of all ranks' tensors [any shape, the same on all ranks]."""
    return start_all_reduce(tensor, group).wait()


def start_all_reduce(tensor: Tensor, group: Group) -> PendingTensor:
    """Starts `all_reduce_sum`; the tensor must not change until it is waited for."""
    if group.size == 1:
        return PendingTensor("a sum", tensor, group, CollectiveWork("sum", [], tensor))
    shape = tensor.shape
    tag = call_tag("sum", tensor.dtype, tuple(shape))
    work = all_reduce_in_rank_order(tensor.detach().contiguous().view(-1), group, tag=tag)
    return PendingTensor("a sum", tensor, group, work, lambda total: total.view(shape))


def all_gather_along(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenates all ranks' tensors [..., n of this rank, ...] along `dim` in rank order; contiguous.

    `sizes` is n by rank; None asks the other ranks in one more message.
    """
    return start_all_gather(tensor, group, dim, sizes).wait()


def start_all_gather(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> PendingTensor:
    """Starts `all_gather_along`; the tensor must not change until it is waited for."""
    if group.size == 1:
        return PendingTensor("a gathering", tensor, group, CollectiveWork("gather", [], tensor))
    dim = dim % tensor.dim()
    sizes = gather_sizes(tensor.shape[dim], group, sizes)
    before, after = tensor.shape[:dim], tensor.shape[dim + 1 :]
    shapes = [(*before, size, *after) for size in sizes]
    numels = [size * before.numel() * after.numel() for size in sizes]
    flat = tensor.detach().contiguous().view(-1)
    output = torch.empty(sum(numels), dtype=flat.dtype, device=flat.device)
    uneven = numels if len(set(numels)) > 1 else None
    work = all_gather(output, flat, group, sizes=uneven, tag=call_tag("gather", flat.dtype, *shapes))

    def concatenate(found: Tensor) -> Tensor:
        if before.numel() == 1:
            return found.view(*before, sum(sizes), *after)
        return torch.cat([part.view(shape) for part, shape in zip(found.split(numels), shapes, strict=True)], dim)

    return PendingTensor("a gathering", tensor, group, work, concatenate)


def reduce_scatter_along(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Returns this rank's slice along `dim` of the sum of all ranks' tensors [..., N, ...]; contiguous.

    `sizes` is how much of N each rank gets; None is as even as possible.
    """
    return start_reduce_scatter(tensor, group, dim, sizes).wait()


def start_reduce_scatter(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> PendingTensor:
    """Starts `reduce_scatter_along`; the tensor must not change until it is waited for."""
    if group.size == 1:
        return PendingTensor("a sum by parts", tensor, group, CollectiveWork("sum of parts", [], tensor))
    dim = dim % tensor.dim()
    sizes = check_sizes(tensor.shape[dim], group, sizes)
    outer = tensor.shape[:dim].numel()
    numels = [size * outer * tensor.shape[dim + 1 :].numel() for size in sizes]
    if outer == 1:
        flat = tensor.detach().contiguous().view(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in tensor.detach().split(list(sizes), dim)])
    uneven = numels if len(set(numels)) > 1 else None
    dtype = accumulation_dtype(flat.dtype) if peer_to_peer(group, flat.device) else flat.dtype
    tag = call_tag("sum of parts", flat.dtype, tuple(tensor.shape))
    shape = (*tensor.shape[:dim], sizes[group.rank], *tensor.shape[dim + 1 :])
    work = reduce_scatter(flat, group, dtype=dtype, average=False, sizes=uneven, tag=tag)
    return PendingTensor("a sum by parts", tensor, group, work, lambda part: part.to(tensor.dtype).view(shape))


def local_slice(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Returns this rank's slice of [..., N, ...] along `dim`, a view; nothing is sent. None is as even as possible."""
    if group.size == 1:
        return tensor
    sizes = check_sizes(tensor.shape[dim], group, sizes)
    return tensor.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])


def check_sizes(total: int, group: Group, sizes: Sequence[int] | None = None) -> Sequence[int]:
    """Returns how much of `total` each rank has; `ValueError` where the given sizes do not add up to it."""
    if sizes is None:
        return even_sizes(total, group.size)
    if len(sizes) != group.size or sum(sizes) != total:
        raise ValueError(
            f"expected the parts of {group.size} ranks, which add up to the {total} that the tensor has along this "
            f"dimension, got {list(sizes)}"
        )
    return sizes


def gather_sizes(own: int, group: Group, sizes: Sequence[int] | None = None) -> Sequence[int]:
    """Returns how much of a dimension each rank has, of which this rank has `own`; None asks the other ranks."""
    if sizes is None:
        return [row[0] for row in exchange([own], group)]
    if len(sizes) != group.size or sizes[group.rank] != own:
        raise ValueError(
            f"expected the sizes of {group.size} ranks, of which rank {group.rank} has the {own} of its tensor, got "
            f"{list(sizes)}"
        )
    return sizes


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


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """`function.apply`, which torch leaves untyped."""
    return function.apply(*args)


# Each of these is the backward of another one: see the table above.


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
