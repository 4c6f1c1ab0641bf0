"""All-reduce, all-gather and reduce-scatter along any dimension of a tensor; nothing here is differentiable.

No argument is written to. Summands are added in rank order, those of half precision in fp32, and rounded once, so that
one process can compute the same number to the bit. On CUDA the order, and for half precision the rounding, are NCCL's.
Each `start_...` returns a `PendingTensor`, so that something can be computed until it is waited for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from scale_core.comm.collectives import UNIT_TAGS, CollectiveWork, all_gather, exchange, peer_to_peer, reduce_scatter
from scale_core.comm.group import Group
from scale_core.comm.layer_collectives import all_reduce_in_rank_order
from scale_core.compat import NO_RANGE, profiler_runs
from scale_core.consistency.execution_order import fingerprint_of
from scale_core.errors import TransferError
from scale_tp.failed_pass import add_explanation
from scale_tp.split import even_sizes


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
