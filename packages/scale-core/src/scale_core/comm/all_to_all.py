"""The exchange of parts of a tensor between each pair of ranks: tokens for experts, pieces of shards and states."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core import fault_points
from scale_core.comm.collectives import (
    UNTAGGED,
    check_dtypes,
    fill,
    parts_by_rank,
    peer_to_peer,
    peers,
    post_messages,
    torch_group,
)
from scale_core.comm.group import Group
from scale_core.comm.work import CollectiveWork, start_work


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
        input_sizes: The number of elements for each rank; None is S each. Each receiver must expect the number that
            this rank sends.
        tag: As in `all_gather`.

    Raises:
        ValueError: The sizes or dtypes do not fit each other.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.comm.all_to_all import all_to_all
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
