"""Collectives of layers that are parallel over ranks: an exchange between each pair, and a sum with equal bits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import fault_points
from scale_core.comm.collectives import (
    UNTAGGED,
    CollectiveWork,
    all_gather,
    all_reduce,
    check_dtypes,
    fill,
    parts_by_rank,
    peer_to_peer,
    peers,
    post_messages,
    reduce_scatter,
    torch_group,
)
from scale_core.comm.group import Group
from scale_core.comm.work import start_work


def all_to_all(
    output: Tensor,
    input: Tensor,
    group: Group,
    *,
    output_sizes: Sequence[int] | None = None,
    input_sizes: Sequence[int] | None = None,
    tag: int = UNTAGGED,
) -> CollectiveWork:
    """Starts to send part r of `input` to rank r; part r of `output` comes from rank r.

    Args:
        output: [W * S], or [sum of `output_sizes`].
        input: [W * S], or [sum of `input_sizes`], of the same dtype; must not change before `wait()`.
        group: The W ranks.
        output_sizes: How many elements come from each rank; None is S each.
        input_sizes: The number of elements for each rank; None is S each. The number this rank sends to another one is
            that one expects from it.
        tag: As in `all_gather`.

    Raises:
        ValueError: The sizes or dtypes do not fit each other.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.comm.layer_collectives import all_to_all
        >>> output = torch.zeros(4)
        >>> _ = all_to_all(output, torch.arange(4.0), Group()).wait()
        >>> output
        tensor([0., 1., 2., 3.])

    See also: [the core](../how-the-core-works.md).
    """
    check_dtypes("all_to_all", output, input)
    sent = parts_by_rank("all_to_all", "input", input, group, input_sizes)
    received = parts_by_rank("all_to_all", "output", output, group, output_sizes)
    if output_sizes is None and input_sizes is None and output.numel() != input.numel():
        raise ValueError(f"all_to_all: expected equal sizes, got {output.numel()} and {input.numel()} elements")
    if group.size == 1:
        fill(received[0], sent[0])
        return CollectiveWork("all_to_all", [], output)
    if fault_points.active is not None:
        fault_points.active("all_to_all", "")
    if not peer_to_peer(group, input.device):
        start = partial(
            dist.all_to_all_single,
            output,
            input,
            output_split_sizes=None if output_sizes is None else list(output_sizes),
            input_split_sizes=None if input_sizes is None else list(input_sizes),
            group=torch_group(group),
            async_op=True,
        )
        return CollectiveWork("all_to_all", [start_work(None, start)], output, keep=[input], rank=group.rank)
    targets = {peer: received[peer].view(torch.uint8) for peer in peers(group)}
    sources = {peer: sent[peer].view(torch.uint8) for peer in peers(group)}
    fill(received[group.rank], sent[group.rank])
    works = post_messages(group, targets, sources, tag)
    return CollectiveWork(
        "all_to_all", works, output, keep=[input, *targets.values(), *sources.values()], rank=group.rank
    )


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
