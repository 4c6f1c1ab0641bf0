"""A deterministic all-reduce: the summands are added in rank order, and all ranks get the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from scale_core.comm.collectives import all_gather, all_reduce, peer_to_peer, reduce_scatter
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork


def all_reduce_in_rank_order(flat: Tensor, group: Group, *, average: bool = False, tag: int) -> CollectiveWork:
    """Starts the sum or average of every rank's `flat` [N]; all ranks get the same bits, and no argument is written to.

    On the host the summands are added in rank order, in fp32 at least, and rounded once. On a device the order is the
    transport's. Ranks whose tags differ time out instead of mixing their data.

    Args:
        flat: [N], contiguous, equal N and dtype on all ranks; must not change before `wait()`.
        group: The W ranks.
        average: Divide by W.
        tag: As in `all_gather`.

    Returns:
        A handle whose result [N] is a new tensor, or in a world of one `flat` itself.
    """
    if group.size == 1:
        return CollectiveWork("all_reduce", [], flat)
    if not peer_to_peer(group, flat.device):
        work = all_reduce(flat.clone(), group)
        return work.then(lambda total: total.div_(group.size)) if average else work
    dtype = flat.dtype
    wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
    if group.size == 2:  # One round of messages where a reduction and a gather are two, and no more bytes.
        both = torch.empty(2, flat.numel(), dtype=dtype, device=flat.device)

        def add(_: Tensor) -> Tensor:
            total = both[0].to(wide) + both[1]
            return (total.div_(2) if average else total).to(dtype)

        return all_gather(both.view(-1), flat, group, tag=tag).then(add)
    part = -(-flat.numel() // group.size)
    sizes = [min(part, max(0, flat.numel() - rank * part)) for rank in range(group.size)]

    def gather_parts(part: Tensor) -> CollectiveWork:
        return all_gather(torch.empty_like(flat), part.to(dtype), group, sizes=sizes, tag=tag)

    return reduce_scatter(flat, group, dtype=wide, average=average, sizes=sizes, tag=tag).then(gather_parts)
