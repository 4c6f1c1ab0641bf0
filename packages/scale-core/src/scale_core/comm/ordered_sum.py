"""An all-reduce in messages with tags: sums in the order of ranks, which one process can compute to the bit.

Ranks at different tensors of one shape never read each other's data. On the host, summands of half precision are added
in fp32 and rounded once, and each rank sends what an all-reduce does. Over NCCL it is NCCL's all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather, all_reduce, peer_to_peer, reduce_scatter
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork


def start_ordered_sum(
    tensor: Tensor, group: Group, *, tag: int, average: bool = False
) -> tuple[CollectiveWork, Callable[[Tensor], Tensor]]:
    """Starts the sum, or average, of a tensor [any shape] over at least two ranks; it must not change until then.

    Returns:
        What is under way, and what turns its result into the sum: `finish(work.wait())`, a tensor of its own.
    """
    shape, dtype, flat = tensor.shape, tensor.dtype, tensor.detach().contiguous().view(-1)
    if not peer_to_peer(group, tensor.device):
        work = all_reduce(flat.clone(), group)
        return work, lambda total: (total.div_(group.size) if average else total).view(shape)
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    if group.size == 2:  # One round of messages where a reduction and a gather are two, and no more bytes.
        both = torch.empty(2, flat.numel(), dtype=dtype, device=flat.device)
        work = all_gather(both.view(-1), flat, group, tag=tag)

        def add(_: Tensor) -> Tensor:
            total = both[0].to(wide) + both[1]
            return (total.div_(2) if average else total).to(dtype).view(shape)

        return work, add
    each, rest = divmod(flat.numel(), group.size)
    sizes = [each + (rank < rest) for rank in range(group.size)]
    work = reduce_scatter(flat, group, dtype=wide, average=average, sizes=sizes, tag=tag)

    def gather_parts(part: Tensor) -> Tensor:
        total = torch.empty_like(flat)
        return all_gather(total, part.to(dtype), group, sizes=sizes, tag=tag).wait().view(shape)

    return work, gather_parts
