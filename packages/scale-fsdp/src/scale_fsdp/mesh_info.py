"""The ranks of a unit: those that share one copy of it, and those that hold copies (hybrid sharding).

With a mesh of two axes, (replicas, shard), the parameters are sharded over the ranks of the second, and the ranks of
the first hold equal shards. Gathers stay inside a node, say, and only reduced gradients are sent between nodes, which
keeps hundreds of ranks busy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from scale_core.comm.collectives import broadcast
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.comm.subgroups import new_group_limit, subgroup_of, two_axes_of
from scale_core.flat.config import NodeGroups, ShardGroups
from scale_core.shard import Placement, shard_of


@dataclass(frozen=True)
class MeshInfo:
    """The ranks of one unit."""

    shard: Group  # those over which its parameters are sharded
    replicas: Group  # those that hold equal shards; of size 1 without hybrid sharding
    whole: Group  # all of them

    def buffer_groups(self, reshard_after_forward: bool | int | None, node_size: int | None = None) -> ShardGroups:
        """Returns the groups of a unit's buffers; an integer asks for a part that stays after the forward."""
        part = None
        if not isinstance(reshard_after_forward, bool | None) and 1 < reshard_after_forward < self.shard.size:
            part = _neighbor_group(self.shard, reshard_after_forward)
        nodes = None
        if node_size is not None and self.shard.size > 1:
            node_size = min(node_size, self.shard.size)
            intra_node = _neighbor_group(self.shard, node_size) if node_size > 1 else Group()
            nodes = NodeGroups(intra_node, _strided_group(self.shard, node_size))
        return ShardGroups(self.shard, self.replicas, part, nodes)

    def check_reshard_after_forward(self, reshard_after_forward: bool | int | None) -> None:
        """Checks that the ranks divide into groups of this many, unless it is a bool or None."""
        size, ranks = reshard_after_forward, self.shard.size
        if not isinstance(size, bool | None) and (size < 1 or ranks % size):
            divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
            raise ValueError(
                f"reshard_after_forward={size}: {ranks} ranks do not divide into groups of {size}: take one of "
                f"{', '.join(map(str, divisors))}, or True for all of them"
            )

    def broadcast_from_rank_0(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors in place with rank 0's tensors; all ranks call it together, with equal sizes."""
        for tensor in dict.fromkeys(tensors):
            if tensor.numel() and self.whole.size > 1:
                contiguous = tensor.data.contiguous()
                # As bytes: transports know few dtypes, and a copy needs none.
                broadcast(contiguous.reshape(-1).view(torch.uint8), self.whole).wait()
                if not contiguous.is_set_to(tensor.data):
                    tensor.data.copy_(contiguous)

    def reshards_after_forward(self, reshard_after_forward: bool | int | None) -> bool:
        """Whether a unit is released after its forward; among groups of one rank, all of it stays."""
        if isinstance(reshard_after_forward, bool | None):
            return reshard_after_forward is not False
        return reshard_after_forward != 1


def resolve_mesh_info(mesh: GroupLike, params: Iterable[Tensor] = ()) -> MeshInfo:
    """Returns the ranks of a group, or of a mesh of one dimension (shard) or two (replicate, shard).

    A `ParallelDims` has the axes `dp_replicate` and `fsdp`. If the parameters are of experts that its axis `ep`
    divides, the ranks with the same experts, `efsdp`, are in place of `fsdp`.

    Raises:
        ValueError: The mesh has more dimensions, or some parameters are of such experts and others are not.
    """
    axes = ("dp_replicate", "fsdp")
    if isinstance(mesh, ParallelDims) and mesh.ep > 1:
        expert_ranks = group_of(mesh, "ep").ranks
        of_experts = {_is_divided_over(expert_ranks, param) for param in params}
        if len(of_experts) > 1:
            raise ValueError(
                f"fully_shard: the module has experts, which the ranks {list(expert_ranks)} divide, and parameters "
                "that all of these ranks hold. They are sharded over different ranks. Shard the experts first, for "
                "example fully_shard(block.moe.experts, dims), and then fully_shard(block, dims)"
            )
        if of_experts == {True}:
            axes = ("dp_replicate", "efsdp")
    replicas, shard, whole = two_axes_of(mesh, ("replicate", "shard"), alone="shard", axes=axes)
    return MeshInfo(shard, replicas, whole)


def _is_divided_over(ranks: tuple[int, ...], param: Tensor) -> bool:
    """Whether a layer divides a parameter between these ranks, and perhaps more."""
    shard = shard_of(param)
    return (
        shard is not None
        and not shard.gathered
        and any(axis.placement is Placement.SHARD and set(ranks) <= set(axis.group.ranks) for axis in shard.axes)
    )


@functools.cache  # One group for all units that want it: each costs the transport connections and buffers.
def _neighbor_group(group: Group, size: int) -> Group:
    """This rank's part of `group`, cut into runs of `size`."""
    runs = [list(group.ranks[first : first + size]) for first in range(0, group.size, size)]
    return _one_of(group, runs, group.rank // size)


@functools.cache
def _strided_group(group: Group, stride: int) -> Group:
    """The ranks of `group` that have this rank's place in its runs of `stride`."""
    return _one_of(group, [list(group.ranks[first::stride]) for first in range(stride)], group.rank % stride)


def _one_of(group: Group, parts: list[list[int]], mine: int) -> Group:
    """This rank's part of `group`; all its ranks call it together, with all parts."""
    if group.size == dist.get_world_size():
        return group_of([dist.new_group(part, timeout=new_group_limit(group)) for part in parts][mine])
    return subgroup_of(group, parts[mine])  # Others than these ranks know nothing of it.
