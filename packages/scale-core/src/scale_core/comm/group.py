"""The ranks that communicate: torch's process group, or a world of one.

A world of one needs neither an initialized `torch.distributed` nor a special case above this file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scale_core import compat
from scale_core.comm.group_state import GroupState, group_state
from scale_core.comm.mesh import ParallelDims
from scale_core.errors import LaunchError


class RanksOnly(Protocol):
    """Anything with `rank()` and `size()`, for example the stand-in group that fairseq passes in a world of one."""

    def rank(self) -> int: ...

    def size(self) -> int: ...


GroupLike: TypeAlias = "Group | ParallelDims | dist.ProcessGroup | DeviceMesh | RanksOnly | None"


_SINGLE_RANK_STATE = GroupState()  # shared by all groups without a process group


class MeshDim(NamedTuple):
    """A dimension of a `DeviceMesh`."""

    mesh: DeviceMesh
    number: int


@dataclass(frozen=True)
class Group:
    """The ranks of a process group, as one of them sees them.

    Attributes:
        rank: My place among `ranks`, from 0.
        size: How many ranks there are.
        process_group: torch's handle on them; None in a world of one.
        backend: The transport: "gloo", "nccl", "fake" (one process plays one of many ranks), or "none".
        ranks: The global rank of each member, in group order.
        state: This process's record of the process group.
        mesh_dim: The dimension of the user's mesh that these ranks are. None if the group is not from a mesh.

    Examples:
        >>> from scale_core import Group, group_of
        >>> Group()  # a world of one: no process group is needed
        Group(rank=0, size=1, process_group=None, backend='none', ranks=(0,))
        >>> group_of().size
        1

    See also: [the core](../how-the-core-works.md).
    """

    rank: int = 0
    size: int = 1
    process_group: dist.ProcessGroup | None = None
    backend: str = "none"
    ranks: tuple[int, ...] = (0,)
    state: GroupState = field(default=_SINGLE_RANK_STATE, repr=False, compare=False)
    mesh_dim: MeshDim | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} ({self.backend})"

    def __deepcopy__(self, memo: object) -> Group:
        """A copy is the same group."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the ranks; unpickling looks the process group up again."""
        return _lookup, (self.rank, self.size, self.ranks)


def group_of(process_group: GroupLike = None, *axes: str) -> Group:
    """Returns the `Group` of a process group, mesh or stand-in.

    Args:
        process_group: A `ParallelDims`, a process group, a one-dimensional `DeviceMesh`, or an object with `rank()` and
            `size()` of size 1. None is the default group, or a world of one if `torch.distributed` is not initialized.
        axes: The axis of a `ParallelDims` that the caller means, or several together. Without it, all ranks.

    Raises:
        LaunchError: It is None, a launcher has started several ranks, and `torch.distributed` is not initialized. Each
            rank would train by itself.
        TypeError: It is none of these.
        ValueError: A mesh of several dimensions, a group that this rank is not a member of, or a stand-in object
            that claims more than one rank.

    Examples:
        >>> from scale_core import group_of
        >>> group_of().size  # all ranks; of a process group or a mesh of one dimension, its ranks
        1

    See also: [the core](../how-the-core-works.md).
    """
    if isinstance(process_group, Group):
        return process_group
    if isinstance(process_group, ParallelDims):
        check_initialized()
        axes = axes or ("world",)
        return Group() if process_group.size(*axes) == 1 else _from_torch(process_group.process_group(*axes))
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            check_initialized()
            return Group()
        return _from_torch(dist.group.WORLD)
    if process_group is cast(object, dist.GroupMember.NON_GROUP_MEMBER):  # new_group returned it
        raise ValueError(
            "this rank is not a member of the process group: call the function only on the ranks that were given to "
            "torch.distributed.new_group(ranks)"
        )
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise num_dims_error(process_group)
        return mesh_dim_group(process_group, 0)
    if isinstance(process_group, dist.ProcessGroup):
        return _from_torch(process_group)
    if callable(getattr(process_group, "rank", None)) and callable(getattr(process_group, "size", None)):
        size = process_group.size()
        if size != 1:
            raise ValueError(
                f"expected a torch ProcessGroup, got {type(process_group).__name__} with {size} ranks, which can't "
                "communicate: pass the result of torch.distributed.new_group()"
            )
        return Group()
    raise TypeError(
        f"expected a ProcessGroup, a DeviceMesh, a ParallelDims or None, got {type(process_group).__name__}: "
        "pass the result of torch.distributed.new_group(), or nothing for the default group"
    )


def mesh_dim_group(mesh: DeviceMesh, number: int) -> Group:
    """Returns this rank's group along one dimension of a mesh."""
    return replace(_from_torch(mesh.get_group(number)), mesh_dim=MeshDim(mesh, number))


def num_dims_error(mesh: DeviceMesh, two: tuple[str, ...] = (), alone: str = "") -> ValueError:
    """The error of a `DeviceMesh` of several dimensions; `two` names those that a caller takes together."""
    expected, part, names = "", "one of them", (mesh.mesh_dim_names or ("axis",))[:1]
    if two:
        expected, part, names = f" ({alone}) or two ({', '.join(two)})", "a part of it", two
    return ValueError(
        f"expected a DeviceMesh of one dimension{expected}, got {mesh.ndim} dimensions {mesh.mesh_dim_names}: pass "
        f"{part}, such as mesh[{', '.join(map(repr, names))}], or a ParallelDims"
    )


def check_initialized() -> None:
    """Refuses a missing group where a launcher has started several ranks: each would train alone.

    Raises:
        LaunchError: `WORLD_SIZE` is above 1, and torch.distributed is not initialized.
    """
    count = os.environ.get("WORLD_SIZE", "1")
    if count.isdecimal() and int(count) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise LaunchError(
            f"this is one of {count} ranks (WORLD_SIZE), but torch.distributed is not initialized, so that each would "
            "train alone: call scale_core.launch.init_distributed() or torch.distributed.init_process_group() first"
        )


def _lookup(rank: int, size: int, ranks: tuple[int, ...]) -> Group:
    """The group of these ranks among those that exist now; the default one where it fits."""
    found = [_from_torch(group) for group in compat.process_groups()]
    group = next((group for group in found if group.ranks == ranks), None)
    if group is None and size == 1:
        return Group()
    if group is None:
        default = f"the default group has ranks {list(found[0].ranks)}" if found else ""
        raise ValueError(
            f"the pickled object was sharded over ranks {list(ranks)}, but "
            f"{default or 'torch.distributed is not initialized'}. "
            f"Read it after init_process_group() on these ranks, or after new_group({list(ranks)}) if there are more. "
            "For a different number of ranks, load a snapshot"
        )
    if group.rank != rank:
        raise ValueError(
            f"the pickled object has the shard of rank {rank} of {size}, and this is rank {group.rank}: save one file "
            "per rank, and read on each rank the file that it saved"
        )
    return group


def _from_torch(process_group: dist.ProcessGroup | None) -> Group:
    assert process_group is not None, "torch.distributed is initialized, but has no default group"
    ranks = tuple(dist.get_process_group_ranks(process_group))
    backend, state = compat.backend_of(process_group), group_state(process_group, ranks)
    return Group(dist.get_rank(process_group), len(ranks), process_group, backend, ranks, state)
