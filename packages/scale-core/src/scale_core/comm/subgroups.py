"""Groups of some ranks of a group, and of all ranks of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scale_core import compat
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, GroupLike, group_of, mesh_dim_group, num_dims_error
from scale_core.comm.mesh import ParallelDims


def subgroup_of(group: Group, ranks: Sequence[int]) -> Group:
    """Returns the group of some ranks (global numbers) of a group; all ranks of `group` call it together."""
    # torch names a group that only its members make by how many groups each of them is in so far: members that are in
    # different numbers would wait for each other in vain. So those in fewer first make up for it by groups of their
    # own.
    num_groups = len(compat.process_groups())
    counts = dict(zip(group.ranks, (row[0] for row in exchange([num_groups], group)), strict=True))
    if group.ranks[group.rank] not in ranks:
        return Group()
    return _new_group_among(ranks, max(counts[rank] for rank in ranks), group)


def mesh_group(mesh: DeviceMesh) -> Group:
    """Returns the group of all ranks of a mesh, in row-major order; they all call it together."""
    if compat.spans_world(mesh):
        return group_of(compat.flatten_mesh(mesh))
    axes = tuple(group_of(mesh.get_group(axis)) for axis in range(mesh.ndim))
    return _mesh_group(axes, compat.ranks_of_mesh(mesh))


class TwoAxes(NamedTuple):
    """The groups of a rank on two axes, and the group of all ranks of both."""

    first: Group
    second: Group
    both: Group


def two_axes_of(mesh: GroupLike, names: tuple[str, str], alone: str, axes: tuple[str, str]) -> TwoAxes:
    """Returns the groups of a `ParallelDims` or of a `DeviceMesh` of two dimensions; all its ranks call it together.

    Args:
        mesh: A `DeviceMesh` of one dimension, and a process group, have one axis. The other has one rank.
        names: What the two dimensions of a `DeviceMesh` mean, for its error.
        alone: Which of them one dimension is.
        axes: The axes of a `ParallelDims`.

    Raises:
        ValueError: The mesh has more than two dimensions.
    """
    if isinstance(mesh, ParallelDims):
        first, second = (group_of(mesh, axis) for axis in axes)
        return TwoAxes(first, second, group_of(mesh, *axes))
    if not isinstance(mesh, DeviceMesh) or mesh.ndim == 1:
        group = group_of(mesh)
        return TwoAxes(group, Group(), group) if alone == names[0] else TwoAxes(Group(), group, group)
    if mesh.ndim != 2:
        raise num_dims_error(mesh, names, alone)
    first, second = (mesh_dim_group(mesh, dim) for dim in (0, 1))
    return TwoAxes(first, second, mesh_group(mesh))


@cache
def _mesh_group(axes: tuple[Group, ...], ranks: tuple[int, ...]) -> Group:
    """The group of all ranks of a mesh that ranks outside of it know nothing of: torch would mix it with theirs."""
    return group_over(axes, ranks)


def group_over(axes: Sequence[Group], ranks: Sequence[int]) -> Group:
    """Returns the group of all ranks (global numbers) of a mesh with these axes; they alone call it, together."""
    most = len(compat.process_groups())
    for axis in axes:  # Along one after the other, each rank hears of all.
        most = max(row[0] for row in exchange([most], axis))
    return _new_group_among(ranks, most, max(axes, key=lambda axis: axis.size))


def _new_group_among(ranks: Sequence[int], most: int, like: Group) -> Group:
    """Makes a group that its members alone call; none of them is in more than `most` groups. See `subgroup_of`."""
    for _ in range(most - len(compat.process_groups())):
        compat.new_group_of_members([dist.get_rank()], None)
    return group_of(compat.new_group_of_members(list(ranks), new_group_limit(like)))


def new_group_limit(group: Group) -> timedelta | None:
    """The timeout for a part of a group: the group's own, where torch would take half an hour."""
    if group.process_group is None or group.backend == "fake":
        return None
    return compat.new_group_limit(group.process_group)
