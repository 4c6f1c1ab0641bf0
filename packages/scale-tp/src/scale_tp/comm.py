"""Sums and parts of tensors between the ranks of a group, along any dimension; nothing here is differentiable.

Below are collectives on one dimension. Here is what layers ask for: a sum of everybody's tensor, the parts of all ranks
one behind the other along a dimension, this rank's part of a sum. No argument is written to.

A sum adds the ranks' summands in rank order, those of half precision in fp32, and rounds once; so one process can
compute the same number to the bit. On CUDA the order, and for half precision the rounding, are NCCL's.

Each can be begun alone, by whoever has something to compute in the meantime, and be waited for then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core.comm.collectives import UNIT_TAGS, Pending, all_gather, all_reduce, peer_to_peer, reduce_scatter
from scale_core.comm.control_plane import exchange, exchange_text
from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_core.consistency.execution_order import Event, identity, message_tag
from scale_tp.split import even_sizes


@functools.lru_cache(maxsize=4096)
def tag_of(*words: object) -> int:
    """Returns the tag of messages of which these words are true, such as what is sent, its dtype and its shapes.

    Args:
        *words: All that has to be the same on sender and receiver, hashable.

    Example:
        >>> tag_of("sum", "fp32", (2, 3)) == tag_of("sum", "fp32", (2, 3))
        True
    """
    return UNIT_TAGS[identity(*words) % len(UNIT_TAGS)]


# The dtype that sums are made in: fp32, or the summands' own where that is wider.
#
# Half precision loses what is added late, so whatever adds up here widens first and rounds once.


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype to add in: fp32 for half precision, and every other one as it is.

    Example:
        >>> wide_dtype(torch.bfloat16), wide_dtype(torch.float64), wide_dtype(torch.int64)
        (torch.float32, torch.float64, torch.int64)
    """
    return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype


def wide(tensor: Tensor) -> Tensor:
    """Returns the tensor in that dtype; the same one where it has it."""
    return tensor.to(wide_dtype(tensor.dtype))


class Purpose(NamedTuple):
    """What a transfer is for, as an error says it.

    Attributes:
        verb: Such as "a sum".
        shape: Of what this rank gives.
        dtype: Of that.
        group: The ranks that have to take part.
    """

    verb: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Group

    def __str__(self) -> str:
        return (
            f"in {self.verb} of {list(self.shape)} {self.dtype} over the ranks {list(self.group.ranks)}: all of them "
            "have to call the same layers in the same order, with inputs of one shape and dtype"
        )


class Coming(NamedTuple):
    """A tensor that is on its way; it has to be waited for.

    Attributes:
        purpose: What it is.
        pending: The transfer, which owns its buffers.
        finish: Makes the tensor of what has arrived.
    """

    purpose: Purpose
    pending: Pending
    finish: Callable[[Tensor], Tensor]

    def wait(self) -> Tensor:
        """Returns the tensor.

        Raises:
            TransferError: A rank did not take part.
        """
        try:
            return self.finish(self.pending.wait())
        except TransferError as error:
            error.add_note(str(self.purpose))
            raise


def sum_over(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum of every rank's tensor [any shape], which is the same on all ranks.

    Args:
        tensor: Of one shape and dtype on all ranks.
        group: The ranks.

    Raises:
        TransferError: A rank did not take part.
    """
    return tensor if group.size == 1 else begin_sum(tensor, group).wait()


def begin_sum(tensor: Tensor, group: Group) -> Coming:
    """Starts what `sum_over` does; the tensor must not change before the sum has been waited for."""
    purpose = Purpose("a sum", tuple(tensor.shape), tensor.dtype, group)
    if group.size == 1:
        return Coming(purpose, Pending("sum", [], tensor), as_it_is)
    if not peer_to_peer(group, tensor.device):
        return Coming(purpose, all_reduce(tensor.clone(memory_format=torch.contiguous_format), group), as_it_is)
    flat = tensor.detach().contiguous().view(-1)
    tag = tag_of("sum", flat.dtype, tuple(tensor.shape))
    if group.size == 2:  # One round of messages where a reduction and a gather are two, and no more bytes.
        both = torch.empty(2 * flat.numel(), dtype=flat.dtype, device=flat.device)
        shape = tensor.shape
        return Coming(purpose, all_gather(both, flat, group, tag=tag), lambda found: add_up(found.view(2, *shape)))
    sizes = even_sizes(flat.numel(), group.size)
    own = reduce_scatter(flat, group, dtype=wide_dtype(flat.dtype), average=False, sizes=sizes, tag=tag)

    def put_together(part: Tensor) -> Tensor:
        total = torch.empty_like(flat)
        all_gather(total, part.to(flat.dtype), group, sizes=sizes, tag=tag).wait()
        return total.view(tensor.shape)

    return Coming(purpose, own, put_together)


def gather_along(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Returns all ranks' tensors, one behind the other along `dim` in rank order; contiguous.

    Args:
        tensor: [..., n of this rank, ...]; alike on all ranks but for that dimension.
        group: The ranks.
        dim: The dimension; negative counts from the last.
        sizes: n of each rank, by rank. None asks the others first, in a message more.

    Raises:
        ValueError: This rank's n is not what `sizes` says.
        TransferError: A rank did not take part.
    """
    return tensor if group.size == 1 else begin_gather(tensor, group, dim, sizes).wait()


def begin_gather(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Coming:
    """Starts what `gather_along` does; the tensor must not change before the whole has been waited for."""
    purpose = Purpose("a gathering", tuple(tensor.shape), tensor.dtype, group)
    if group.size == 1:
        return Coming(purpose, Pending("gather", [], tensor), as_it_is)
    dim = dim % tensor.dim()
    sizes = sizes_of_all(tensor.shape[dim], group, sizes)
    before, after = tensor.shape[:dim], tensor.shape[dim + 1 :]
    shapes = [(*before, size, *after) for size in sizes]
    numbers = [size * before.numel() * after.numel() for size in sizes]
    flat = tensor.detach().contiguous().view(-1)
    whole = torch.empty(sum(numbers), dtype=flat.dtype, device=flat.device)
    alike = numbers if len(set(numbers)) > 1 else None
    pending = all_gather(whole, flat, group, sizes=alike, tag=tag_of("gather", flat.dtype, *shapes))
    if before.numel() == 1:
        return Coming(purpose, pending, lambda found: found.view(*before, sum(sizes), *after))

    def put_together(found: Tensor) -> Tensor:
        return torch.cat([part.view(shape) for part, shape in zip(found.split(numbers), shapes, strict=True)], dim)

    return Coming(purpose, pending, put_together)


def sum_scatter_along(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Returns this rank's part along `dim` of the sum of every rank's tensor; contiguous.

    Args:
        tensor: [..., N, ...], of one shape and dtype on all ranks.
        group: The ranks.
        dim: The dimension; negative counts from the last.
        sizes: How much of N each rank gets, by rank; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.
        TransferError: A rank did not take part.
    """
    return tensor if group.size == 1 else begin_sum_scatter(tensor, group, dim, sizes).wait()


def begin_sum_scatter(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Coming:
    """Starts what `sum_scatter_along` does; the tensor must not change before the part has been waited for."""
    purpose = Purpose("a sum by parts", tuple(tensor.shape), tensor.dtype, group)
    if group.size == 1:
        return Coming(purpose, Pending("sum of parts", [], tensor), as_it_is)
    dim = dim % tensor.dim()
    sizes = parts_of(tensor.shape[dim], group, sizes)
    others = tensor.shape[:dim].numel() * tensor.shape[dim + 1 :].numel()
    numbers = [size * others for size in sizes]
    if tensor.shape[:dim].numel() == 1:
        flat = tensor.detach().contiguous().view(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in tensor.detach().split(list(sizes), dim)])
    alike = numbers if len(set(numbers)) > 1 else None
    dtype = wide_dtype(flat.dtype) if peer_to_peer(group, flat.device) else flat.dtype
    tag = tag_of("sum of parts", flat.dtype, tuple(tensor.shape))
    shape = (*tensor.shape[:dim], sizes[group.rank], *tensor.shape[dim + 1 :])
    pending = reduce_scatter(flat, group, dtype=dtype, average=False, sizes=alike, tag=tag)
    narrow = flat.dtype
    return Coming(purpose, pending, lambda own: own.to(narrow).view(shape))


def part_along(tensor: Tensor, group: Group, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """Returns this rank's part along `dim`: a view. Nothing is sent.

    Args:
        tensor: [..., N, ...].
        group: The ranks.
        dim: The dimension; negative counts from the last.
        sizes: How much of N each rank has, by rank; None is as even as it can be.

    Raises:
        ValueError: `sizes` do not add up to N.
    """
    if group.size == 1:
        return tensor
    sizes = parts_of(tensor.shape[dim], group, sizes)
    return tensor.narrow(dim, sum(sizes[: group.rank]), sizes[group.rank])


def parts_of(total: int, group: Group, sizes: Sequence[int] | None = None) -> Sequence[int]:
    """Returns how much of a whole dimension each rank has; None is as even as it can be.

    Raises:
        ValueError: `sizes` are not those of all ranks, or don't add up to the total.
    """
    if sizes is None:
        return even_sizes(total, group.size)
    if len(sizes) != group.size or sum(sizes) != total:
        raise ValueError(
            f"expected the parts of {group.size} ranks, which add up to the {total} that the tensor has along this "
            f"dimension, got {list(sizes)}"
        )
    return sizes


def sizes_of_all(own: int, group: Group, sizes: Sequence[int] | None = None) -> Sequence[int]:
    """Returns how much of a dimension each rank has, of which this rank has `own`; None asks the others.

    Raises:
        ValueError: `sizes` are not those of all ranks, or this rank has another size.
        TransferError: A rank did not answer.
    """
    if sizes is None:
        return [row[0] for row in exchange([own], group)]
    if len(sizes) != group.size or sizes[group.rank] != own:
        raise ValueError(
            f"expected the sizes of {group.size} ranks, of which rank {group.rank} has the {own} of its tensor, got "
            f"{list(sizes)}"
        )
    return sizes


def add_up(summands: Sequence[Tensor] | Tensor) -> Tensor:
    """Returns the sum of two tensors or more, in their order; in fp32 at least, and rounded once."""
    total = wide(summands[0]) + wide(summands[1])
    for summand in summands[2:]:
        total += summand
    return total.to(summands[0].dtype)


def as_it_is(found: Tensor) -> Tensor:
    """What has arrived is the tensor."""
    return found


# Ranks that call one thing with other sizes learn of it, in place of mixing their data or ending in the transport.
#
# Ranks say what they are about to do the first time that they do it; later calls that are alike cost nothing. The
# messages of each call carry a tag that is made of the same words, so that ranks that differ later wait in vain, and
# never read each other's data.

_agreed: WeakKeyDictionary[dist.ProcessGroup, set[int]] = WeakKeyDictionary()


def agree(what: str, words: str, group: Group) -> int:
    """Returns the tag of the messages of a call, which all ranks of the group are about to make alike.

    Args:
        what: What is called, such as "ring_attention".
        words: All that has to be the same on all ranks: shapes of what is sent, dtypes, options.
        group: The ranks that take part.

    Raises:
        TransferError: A rank did not come.
        ValueError: On all ranks: they say different things.
    """
    tag = message_tag(Event(what, words))
    if group.process_group is None or group.backend == "fake":
        return tag
    known = _agreed.setdefault(group.process_group, set())
    mine = identity(what, words)
    if mine not in known:
        if len({row[0] for row in exchange([mine], group)}) > 1:
            told = exchange_text(f"{what}: {words}", group)
            by_rank = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
            raise ValueError(f"the ranks are about to do different things: {by_rank}: call it alike on all of them")
        known.add(mine)
    return tag
