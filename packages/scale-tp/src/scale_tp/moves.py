"""Sums and parts of tensors between the ranks of a group, along any dimension; nothing here is differentiable.

Below are collectives on one dimension. Here is what layers ask for: a sum of everybody's tensor, the parts of all ranks
one behind the other along a dimension, this rank's part of a sum. No argument is written to.

A sum adds the ranks' summands in rank order, those of half precision in fp32, and rounds once; so one process can
compute the same number to the bit. On CUDA the order, and for half precision the rounding, are NCCL's.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from scale_core.collectives import all_gather, all_reduce, reduce_scatter
from scale_core.events import identity
from scale_core.exchange import exchange
from scale_core.group import Group
from scale_core.messages import UNIT_TAGS, peer_to_peer
from scale_tp.split_sizes import even_sizes

_HALVES = (torch.float16, torch.bfloat16)


def sum_over(tensor: Tensor, group: Group) -> Tensor:
    """Returns the sum of every rank's tensor [any shape], which is the same on all ranks.

    Args:
        tensor: Of one shape and dtype on all ranks.
        group: The ranks.

    Raises:
        TransferError: A rank did not take part.
    """
    if group.size == 1:
        return tensor
    if not peer_to_peer(group, tensor.device):
        return all_reduce(tensor.clone(memory_format=torch.contiguous_format), group).wait()
    flat = tensor.detach().contiguous().view(-1)
    tag = _tag("sum", flat.dtype, tuple(tensor.shape))
    if group.size == 2:  # One round of messages where a reduction and a gather are two, and no more bytes.
        both = torch.empty(2 * flat.numel(), dtype=flat.dtype, device=flat.device)
        all_gather(both, flat, group, tag=tag).wait()
        first, second = both.view(2, *tensor.shape)
        return _add(first, second)
    sizes = even_sizes(flat.numel(), group.size)
    wide = torch.float32 if flat.dtype in _HALVES else flat.dtype
    own = reduce_scatter(flat, group, dtype=wide, average=False, sizes=sizes, tag=tag).wait()
    total = torch.empty_like(flat)
    all_gather(total, own.to(flat.dtype), group, sizes=sizes, tag=tag).wait()
    return total.view(tensor.shape)


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
    if group.size == 1:
        return tensor
    dim = dim % tensor.dim()
    sizes = sizes_of_all(tensor.shape[dim], group, sizes)
    shapes = [(*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]) for size in sizes]
    others = tensor.shape[:dim].numel() * tensor.shape[dim + 1 :].numel()
    numbers = [size * others for size in sizes]
    flat = tensor.detach().contiguous().view(-1)
    whole = torch.empty(sum(numbers), dtype=flat.dtype, device=flat.device)
    alike = numbers if len(set(numbers)) > 1 else None
    all_gather(whole, flat, group, sizes=alike, tag=_tag("gather", flat.dtype, *shapes)).wait()
    if tensor.shape[:dim].numel() == 1:
        return whole.view(*tensor.shape[:dim], sum(sizes), *tensor.shape[dim + 1 :])
    return torch.cat([part.view(shape) for part, shape in zip(whole.split(numbers), shapes, strict=True)], dim)


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
    if group.size == 1:
        return tensor
    dim = dim % tensor.dim()
    sizes = parts_of(tensor.shape[dim], group, sizes)
    others = tensor.shape[:dim].numel() * tensor.shape[dim + 1 :].numel()
    numbers = [size * others for size in sizes]
    if tensor.shape[:dim].numel() == 1:
        flat = tensor.detach().contiguous().view(-1)
    else:
        flat = torch.cat([part.reshape(-1) for part in tensor.detach().split(list(sizes), dim)])
    alike = numbers if len(set(numbers)) > 1 else None
    wide = torch.float32 if flat.dtype in _HALVES and peer_to_peer(group, flat.device) else flat.dtype
    tag = _tag("sum of parts", flat.dtype, tuple(tensor.shape))
    own = reduce_scatter(flat, group, dtype=wide, average=False, sizes=alike, tag=tag).wait().to(tensor.dtype)
    return own.view(*tensor.shape[:dim], sizes[group.rank], *tensor.shape[dim + 1 :])


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


def _add(first: Tensor, second: Tensor) -> Tensor:
    if first.dtype in _HALVES:
        return (first.to(torch.float32) + second.to(torch.float32)).to(first.dtype)
    return first + second


@functools.lru_cache(maxsize=4096)
def _tag(verb: str, dtype: torch.dtype, *shapes: Sequence[int]) -> int:
    """The tag of messages: ranks whose tensors are not alike time out, and never mix their data."""
    return UNIT_TAGS[identity("tensor parallel", verb, dtype, *map(tuple, shapes)) % len(UNIT_TAGS)]
