"""Gradients of parameters that all ranks of the expert axis hold, averaged over it in the backward pass.

A wrapper that averages over one group for all of its parameters, as `DistributedDataParallel` and
`ShardedDataParallel` do, is given the ranks with the same experts. Parameters that are not divided are on more ranks
than these.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

from torch import Tensor, nn

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import exchange, exchange_text, fingerprint_of, peer_to_peer
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.errors import ContractError
from scale_core.hooks.autograd import register_post_backward
from scale_core.hooks.gradients import lacks_autograd_hooks
from scale_core.hooks.source_grads import call_source_grad_hooks, has_source_grad_hooks, mark_averaged
from scale_core.shard import Placement, on_local_tensors, shard_of
from scale_moe.mappings import all_reduced


@checked_arguments
def average_replicated_gradients(model: nn.Module, process_group: GroupLike = None) -> None:
    """Averages gradients of replicated parameters over the expert axis, in every backward pass.

    Each gradient is averaged as soon as it is computed, and goes to its next reduction. All ranks of the group have to
    run the same backward passes. If a rank uses parameters that a different rank does not use, both raise an error that
    names one of them. On the host it is a TransferError at once, because messages have names. NCCL matches gradients
    only by their order. There it is a ContractError at the end of the backward pass, when ranks compare the order of
    names. Not for parameters that `fully_shard` has sharded: give that the ranks of each module.

    Args:
        model: Its experts are divided over this group already.
        process_group: The ranks that divide the experts, `ep` of a ParallelDims; None is the default group.

    Raises:
        ValueError: Parameters are sharded already, so that autograd gives them no gradients.

    Example:
        parallelize_experts(model, mesh["expert"])
        average_replicated_gradients(model, mesh["expert"])
        model = DistributedDataParallel(model, process_group=mesh["replica"].get_group())

    Examples:
        >>> import torch
        >>> from scale_moe import MoE, average_replicated_gradients
        >>> model = torch.nn.Sequential(torch.nn.Linear(16, 16), MoE(16, 32, num_experts=4, routing=2))
        >>> average_replicated_gradients(model)  # with DistributedDataParallel, over the expert axis
        >>> model(torch.randn(8, 16)).sum().backward()

    See also: [the guide to experts](../guides/experts.md).
    """
    group = group_of(process_group, "ep")
    replicated = [(name, param) for name, param in model.named_parameters() if not _is_divided_over(group, param)]
    sharded = next((name for name, param in model.named_parameters() if lacks_autograd_hooks(param)), None)
    if sharded is not None:
        raise ValueError(
            f"average_replicated_gradients: '{sharded}' is sharded, and gets its gradient from its unit: leave the "
            'call out, and give fully_shard the ranks of each module: fully_shard(experts, mesh["replica"]), then '
            "fully_shard(model) over all ranks"
        )
    if group.size > 1:
        order = _Order(group)
        for name, param in replicated:
            if param.requires_grad:
                mark_averaged(param, group)
                param.register_hook(_average_hook(param, group, name, order))


def _is_divided_over(group: Group, param: Tensor) -> bool:
    """Whether ranks of the group have other elements; ranks of another axis, as the tensor axis, may nevertheless."""
    shard = shard_of(param)
    return shard is not None and any(
        axis.placement is Placement.SHARD and len(set(axis.group.ranks).intersection(group.ranks)) > 1
        for axis in shard.axes
    )


class _Order:
    """Whose gradients were averaged in the backward pass that runs, in their order."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.names: list[str] = []

    def add(self, name: str) -> None:
        if not self.names:
            register_post_backward(self._compare, self.names.clear)
        self.names.append(name)

    def _compare(self) -> None:
        names, self.names = self.names, []
        if len({row[0] for row in exchange([fingerprint_of(*names)], self.group)}) == 1:
            return
        by_rank = [text.split("\n") for text in exchange_text("\n".join(names), self.group)]
        same = next(i for i in range(len(names) + 1) if len({tuple(row[i : i + 1]) for row in by_rank}) > 1)
        descriptions = ", ".join(
            f"rank {rank}: {row[same] if same < len(row) else 'none'}" for rank, row in enumerate(by_rank)
        )
        raise ContractError(
            f"average_replicated_gradients: the ranks {list(self.group.ranks)} computed gradients in other orders, so "
            f"that what was averaged is of several parameters; first at place {same}, {descriptions}. All of them "
            "have to run the same modules in the same order, forward and backward: give a rank that has no tokens "
            "for a module empty ones, x[:0]. Clear these gradients, and load the last snapshot if an optimizer has "
            "taken a step"
        )


def _average_hook(param: Tensor, group: Group, name: str, order: _Order) -> Callable[[Tensor], Tensor]:
    param_ref = ref(param)  # Which holds the hook.

    @on_local_tensors
    def average(grad: Tensor) -> Tensor:
        if (live_param := param_ref()) is not None and has_source_grad_hooks():
            call_source_grad_hooks(live_param, grad, group.rank)
        if not peer_to_peer(group, grad.device) and group.backend != "fake":
            order.add(name)
        return all_reduced(grad, group, "gradient", name, average=True)

    return average
