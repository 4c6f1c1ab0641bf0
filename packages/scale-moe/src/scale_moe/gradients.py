"""Gradients of what all ranks of the expert axis hold, averaged over it in the backward pass.

A wrapper that averages over one group for all of its parameters, as `DistributedDataParallel` and
`ShardedDataParallel` do, is given the ranks with the same experts. What is not divided is on more ranks than these.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.autograd_hooks import lacks_autograd_hooks
from scale_core.comm.collectives import all_gather, all_reduce, peer_to_peer, reduce_scatter
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.consistency.execution_order import Event, message_tag
from scale_core.errors import TransferError
from scale_core.shard import is_divided


@checked_arguments
def average_replicated_gradients(model: nn.Module, process_group: GroupLike = None) -> None:
    """Averages gradients of all parameters but the divided ones over the expert axis, in every backward pass.

    Each gradient is averaged as soon as it is computed, and goes to what reduces it next. All ranks of the group have
    to run the same backward passes. On the host, where one uses parameters that another one does not, both end with a
    TransferError that names one; NCCL matches gradients by their order alone, and can't tell. Not for what
    `fully_shard` has sharded: give that the ranks of each module.

    Args:
        model: Its experts are divided over this group already.
        process_group: The ranks that divide the experts; None is the default group.

    Raises:
        ValueError: Parameters are sharded already, so that autograd gives them no gradients.

    Example:
        parallelize_experts(model, mesh["expert"])
        average_replicated_gradients(model, mesh["expert"])
        model = DistributedDataParallel(model, process_group=mesh["replica"].get_group())
    """
    group = group_of(process_group)
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad and not is_divided(param)]
    sharded = next((name for name, param in model.named_parameters() if lacks_autograd_hooks(param)), None)
    if sharded is not None:
        raise ValueError(
            f"average_replicated_gradients: '{sharded}' is sharded, and gets its gradient from its unit: leave the "
            'call out, and give fully_shard the ranks of each module: fully_shard(experts, mesh["replica"]), then '
            "fully_shard(model) over all ranks"
        )
    if group.size > 1:
        for name, param in named:
            param.register_hook(partial(_average, group, name))


def _average(group: Group, name: str, grad: Tensor) -> Tensor:
    flat = grad.clone(memory_format=torch.contiguous_format).view(-1)  # Others hold the one that came.
    if not peer_to_peer(group, flat.device):
        return all_reduce(flat, group).wait().div_(group.size).view_as(grad)
    # In halves, whose messages have tags: ranks at different gradients of one shape never read each other's.
    size = -(-flat.numel() // group.size)
    sizes = [min(size, max(0, flat.numel() - rank * size)) for rank in range(group.size)]
    tag = message_tag(Event(f"average of gradients {flat.dtype} {flat.numel()}", name))
    try:
        part = reduce_scatter(flat, group, sizes=sizes, tag=tag).wait()
        return all_gather(flat, part, group, sizes=sizes, tag=tag).wait().view_as(grad)
    except TransferError as error:
        error.add_note(
            f"in the average of the gradient of '{name}' over the ranks {list(group.ranks)}: has each of them computed "
            "a gradient of it, in the same order?"
        )
        raise
