"""The ranks of a unit: those that share one copy of it, and those that hold copies (hybrid sharding).

With a mesh of two axes, (replicas, shard), the parameters are sharded over the ranks of the second, and the ranks of
the first hold equal shards. Gathers stay inside a node, say, and only reduced gradients are sent between nodes, which
is what keeps hundreds of ranks busy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scale_core import compat
from scale_core.comm.collectives import broadcast, group_over, new_group_limit, subgroup_of
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.flat.buffer import ShardGroups


@dataclass(frozen=True)
class MeshInfo:
    """The ranks of one unit."""

    shard: Group  # those over which its parameters are sharded
    replicas: Group  # those that hold equal shards; of size 1 without hybrid sharding
    whole: Group  # all of them

    def buffer_groups(self, reshard_after_forward: bool | int) -> ShardGroups:
        """Returns the groups of the unit's buffers; an integer asks for a part that stays after the forward."""
        part = None
        if not isinstance(reshard_after_forward, bool) and 1 < reshard_after_forward < self.shard.size:
            part = _neighbour_group(self.shard, reshard_after_forward)
        return ShardGroups(self.shard, self.replicas, part)

    def check_reshard_after_forward(self, reshard_after_forward: bool | int) -> None:
        """Checks that the ranks divide into groups of this many, unless it is a bool."""
        size, ranks = reshard_after_forward, self.shard.size
        if not isinstance(size, bool) and (size < 1 or ranks % size):
            divisors = [number for number in range(1, ranks + 1) if ranks % number == 0]
            raise ValueError(
                f"reshard_after_forward={size}: {ranks} ranks do not divide into groups of {size}: take one of "
                f"{', '.join(map(str, divisors))}, or True for all of them"
            )

    def broadcast_from_rank_0(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors by rank 0's, in place; all ranks call it together, with tensors of equal sizes."""
        for tensor in dict.fromkeys(tensors):
            if tensor.numel() and self.whole.size > 1:
                whole = tensor.data.contiguous()
                # As bytes: transports know few dtypes, and a copy needs none.
                broadcast(whole.reshape(-1).view(torch.uint8), self.whole).wait()
                if not whole.is_set_to(tensor.data):
                    tensor.data.copy_(whole)

    def reshards_after_forward(self, reshard_after_forward: bool | int) -> bool:
        """Whether a unit is released after its forward; among groups of one rank, all of it stays."""
        return bool(reshard_after_forward) if isinstance(reshard_after_forward, bool) else reshard_after_forward != 1


def resolve_mesh_info(process_group: GroupLike) -> MeshInfo:
    """Returns the ranks of a group, or of a mesh of one axis (shard) or two (replicas, shard)."""
    if isinstance(process_group, DeviceMesh) and process_group.ndim > 1:
        if process_group.ndim > 2:
            raise ValueError(
                f"expected a DeviceMesh of one dimension (shard) or two (replicas, shard), got {process_group.ndim} "
                f"dimensions {process_group.mesh_dim_names}: pass a part of it, such as mesh['replicas', 'shard']"
            )
        replicas, shard = (group_of(process_group.get_group(axis)) for axis in (0, 1))
        if compat.spans_world(process_group):
            return MeshInfo(shard, replicas, group_of(compat.flatten_mesh(process_group)))
        ranks = tuple(int(rank) for rank in process_group.mesh.flatten())
        return MeshInfo(shard, replicas, _whole_group(replicas, shard, ranks))
    group = group_of(process_group)
    return MeshInfo(group, Group(), group)


@functools.cache
def _whole_group(replicas: Group, shard: Group, ranks: tuple[int, ...]) -> Group:
    """The group of all ranks of a mesh that ranks outside of it know nothing of: torch would mix it with theirs."""
    return group_over((replicas, shard), ranks)


@functools.cache  # One group for all units that want it: each costs the transport connections and buffers.
def _neighbour_group(group: Group, size: int) -> Group:
    """This rank's part of `group`, cut into runs of `size`."""
    runs = [list(group.ranks[first : first + size]) for first in range(0, group.size, size)]
    mine = group.rank // size
    if group.size == dist.get_world_size():
        return group_of([dist.new_group(run, timeout=new_group_limit(group)) for run in runs][mine])
    return subgroup_of(group, runs[mine])  # Others than these ranks know nothing of it.
