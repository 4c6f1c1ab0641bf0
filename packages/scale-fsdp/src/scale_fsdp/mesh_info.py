"""Between which ranks a unit is cut, and which hold copies: one axis of a mesh for each.

With a mesh of two axes, (replicas, shard), the parameters are cut between the ranks of the second and every rank of
the first holds the same cut: hybrid sharding. Gathers stay inside a node, say, and only the reduced gradients travel
between nodes, which is what keeps hundreds of ranks busy.
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
from scale_core.comm.collectives import broadcast
from scale_core.comm.group import Group, GroupLike, check_not_forgotten, group_of
from scale_core.comm.subgroup import subgroup_of
from scale_core.flat.buffer import Groups


@dataclass(frozen=True)
class Ranks:
    """The ranks of one unit.

    Attributes:
        shard: Those between which its parameters are cut.
        replicas: Those that hold the same cut; of size 1 without hybrid sharding.
        whole: All of them together.
    """

    shard: Group
    replicas: Group
    whole: Group

    def with_part(self, reshard_after_forward: bool | int) -> Groups:
        """Returns the groups of the unit's buffers; an integer asks for a part that stays after the forward.

        Raises:
            ValueError: The ranks do not divide into groups of this many.
        """
        part = None
        self.check_part(reshard_after_forward)
        if not isinstance(reshard_after_forward, bool) and 1 < reshard_after_forward < self.shard.size:
            part = _neighbours(self.shard, reshard_after_forward)
        return Groups(self.shard, self.replicas, part)

    def check_part(self, reshard_after_forward: bool | int) -> None:
        """Checks that there is the part that `with_part` makes.

        Raises:
            ValueError: The ranks do not divide into groups of this many.
        """
        if not isinstance(reshard_after_forward, bool):
            _check_divides(self.shard, reshard_after_forward)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors by those of rank 0, in place; all ranks call it together, with tensors of equal sizes."""
        for tensor in dict.fromkeys(tensors):
            if tensor.numel() and self.whole.size > 1:
                whole = tensor.data.contiguous()
                # As bytes: transports know few dtypes, and a copy needs none.
                broadcast(whole.reshape(-1).view(torch.uint8), self.whole).wait()
                if not whole.is_set_to(tensor.data):
                    tensor.data.copy_(whole)

    def releases(self, reshard_after_forward: bool | int) -> bool:
        """Whether a unit is released after its forward: to one rank each, all of it stays."""
        return bool(reshard_after_forward) if isinstance(reshard_after_forward, bool) else reshard_after_forward != 1


def ranks_of(process_group: GroupLike) -> Ranks:
    """Returns the ranks that a user means by a group or a mesh.

    Args:
        process_group: As for `group_of`, or a mesh of two axes: those that hold copies, then those that share one.

    Raises:
        ValueError: As for `group_of`; a mesh of more than two axes.
        TypeError: As for `group_of`.
        RuntimeError: A launcher has started several ranks, and torch.distributed is not initialised.
    """
    if isinstance(process_group, DeviceMesh) and process_group.ndim > 1:
        if process_group.ndim > 2:
            raise ValueError(
                f"expected a DeviceMesh of one dimension (shard) or two (replicas, shard), got {process_group.ndim} "
                f"dimensions {process_group.mesh_dim_names}: pass a part of it, such as mesh['replicas', 'shard']"
            )
        replicas, shard = (group_of(process_group.get_group(axis)) for axis in (0, 1))
        return Ranks(shard, replicas, group_of(compat.flatten_mesh(process_group)))
    if process_group is None:
        check_not_forgotten()
    group = group_of(process_group)
    return Ranks(group, Group(), group)


def _check_divides(group: Group, size: int) -> None:
    if size < 1 or group.size % size:
        divisors = [number for number in range(1, group.size + 1) if group.size % number == 0]
        raise ValueError(
            f"reshard_after_forward={size}: {group.size} ranks do not divide into groups of {size}: take one of "
            f"{', '.join(map(str, divisors))}, or True for all of them"
        )


@functools.cache
def _neighbours(group: Group, size: int) -> Group:
    """The ranks among which this one stands when `group` is cut into runs of `size`.

    One group for all units that want it: each costs the transport connections and buffers.
    """
    runs = [list(group.ranks[first : first + size]) for first in range(0, group.size, size)]
    mine = group.rank // size
    if group.size == dist.get_world_size():
        return group_of([dist.new_group(run) for run in runs][mine])
    return subgroup_of(group, runs[mine])  # Others than these ranks know nothing of it.
