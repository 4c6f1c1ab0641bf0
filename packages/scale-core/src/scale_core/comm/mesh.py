"""`ParallelDims`: the number of ranks along each axis of parallelism, by torchtitan's names, and the ranks of each.

A program describes its ranks once, and gives the description to every technique. Each technique takes the axes that it
means: `fully_shard` shards over `fsdp`, a divided layer sums over `tp`. First integers only, then process groups.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from scale_core import compat
from scale_core.arguments import checked_arguments, did_you_mean
from scale_core.comm.fork import forked_error
from scale_core.comm.group_state import group_state

# The ranks are arange(world).reshape(pp, dp_replicate, dp_shard, cp, tp): those that divide a layer are neighbors, as
# the GPUs of one machine, and the stages of a pipeline, which send least, are far from each other.
_DENSE = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# Layers of experts divide the ranks of dp_shard x cp again.
_EXPERTS = ("pp", "dp_replicate", "efsdp", "ep", "tp")
_PRODUCTS = {
    "batch": ("dp_replicate", "dp_shard"),
    "fsdp": ("dp_shard", "cp"),
    "loss": ("dp_replicate", "dp_shard", "cp"),
    "edp": ("dp_replicate", "efsdp"),
    "world": _DENSE,
}
AXES = tuple(dict.fromkeys((*_DENSE, *_EXPERTS, *_PRODUCTS)))
"""The names of all axes; see `ParallelDims`."""

# Their groups are made together at the first use: ranks may use them in different orders, for a stage of a pipeline may
# have no experts, and torch matches the calls of `new_group` by their order.
_MADE_TOGETHER = (*((axis,) for axis in AXES), ("ep", "tp"), ("pp", "tp"))


def rank_groups(sizes: Mapping[str, int], *axes: str) -> list[list[int]]:
    """The ranks of each group along an axis, or along several together; integers only.

    Args:
        sizes: The number of ranks along each axis, the slowest axis first.
        axes: The axes in which the ranks of a group differ.

    Example:
        >>> sizes = {"data": 2, "model": 2}
        >>> rank_groups(sizes, "model"), rank_groups(sizes, "data")
        ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in enumerate(itertools.product(*map(range, sizes.values()))):
        others = tuple(index for name, index in zip(sizes, coordinates, strict=True) if name not in axes)
        groups.setdefault(others, []).append(rank)
    return list(groups.values())


NewGroups = dict[tuple[tuple[tuple[int, ...], ...], str | None], dist.ProcessGroup]


def new_group_along(
    partition: Sequence[Sequence[int]],
    new_groups: NewGroups,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Makes the groups of a partition of all ranks and returns this rank's; all ranks call it together.

    Args:
        partition: The global ranks of each group.
        new_groups: The groups of earlier calls, by their partition: an equal partition has the same groups.
        backend: The transport; None is the transport of the default group.
        timeout: None is the timeout of the default group. torch's own is half an hour for any group.
    """
    key = (tuple(map(tuple, partition)), backend)
    if key not in new_groups:
        world, rank = dist.group.WORLD, dist.get_rank()
        if timeout is None and world is not None and not compat.is_fake_group(world):
            timeout = compat.new_group_limit(world)
        # torch wants every rank to make all of them.
        groups = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in partition]
        new_groups[key] = next(group for group, ranks in zip(groups, partition, strict=True) if rank in ranks)
    return new_groups[key]


class _AxisGroups:
    """The process groups of descriptions; the default group's record keeps them, and so must not have that group."""

    def __init__(self) -> None:
        self.by_axes: dict[tuple[ParallelDims, tuple[str, ...]], dist.ProcessGroup | None] = {}  # None: all ranks
        self.new_groups: NewGroups = {}
        self.this_rank: dist.ProcessGroup | None = None  # of this rank only


@checked_arguments
@dataclass(frozen=True)
class ParallelDims:
    """The number of ranks along each axis of parallelism, by the names of torchtitan.

    Every technique takes a `ParallelDims` where it takes a process group or a `DeviceMesh`, and chooses the axis that
    it means. Eight ranks, where two neighbors divide each layer, and the layers are sharded over four ranks:

              tp
            0 -- 1
            |    |
            2 -- 3
       fsdp |    |
            4 -- 5
            |    |
            6 -- 7

    In code, with the groups along each axis:

        >>> dims = ParallelDims(tp=2, world_size=8)
        >>> dims.dp_shard
        4
        >>> dims.ranks("tp")
        [[0, 1], [2, 3], [4, 5], [6, 7]]
        >>> dims.ranks("fsdp")
        [[0, 2, 4, 6], [1, 3, 5, 7]]

    Two copies of the model, each sharded over four ranks, as hybrid sharding has them:

        dp_replicate 0:  0  1  2  3    fsdp
                         |  |  |  |    dp_replicate
        dp_replicate 1:  4  5  6  7    fsdp

    In code:

        >>> dims = ParallelDims(dp_replicate=2, world_size=8)
        >>> dims.ranks("fsdp"), dims.ranks("dp_replicate")
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]])

    Experts are divided over neighbors of `fsdp`. The ranks with the same experts, `efsdp`, shard these:

        experts A  B  A  B  A  B  A  B
        rank    0  1  2  3  4  5  6  7

    In code:

        >>> dims = ParallelDims(ep=2, world_size=8)
        >>> dims.ranks("ep"), dims.ranks("efsdp")
        ([[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]])

    Two stages of a pipeline are far from each other:

        stage 0:  0  1  2  3
                  |  |  |  |   pp
        stage 1:  4  5  6  7

    In code:

        >>> ParallelDims(pp=2, tp=2, world_size=8).ranks("pp")
        [[0, 4], [1, 5], [2, 6], [3, 7]]

    Args:
        dp_replicate: Copies of the model, whose gradients are averaged.
        dp_shard: Ranks that shard each copy. -1 is the number of ranks that the other axes leave.
        cp: Ranks that divide each sequence. They shard the model too.
        tp: Ranks that divide each layer.
        pp: Stages of a pipeline.
        ep: Ranks that divide the experts. They are ranks of `dp_shard x cp`, so `ep` must divide it.
        world_size: The number of ranks. -1 is the number of ranks of `torch.distributed`, or of the launcher before
            it is initialized.

    Axes:
        - `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`: see the arguments. Their order is the order of the ranks.
        - `batch`: `dp_replicate x dp_shard`, the ranks that read different samples.
        - `fsdp`: `dp_shard x cp`, the ranks that shard one copy of the model.
        - `loss`: `dp_replicate x dp_shard x cp`, the ranks that average gradients.
        - `ep`, `efsdp`: `fsdp`, divided into ranks that have different experts and ranks that have the same.
        - `edp`: `dp_replicate x efsdp`, the ranks that average the gradients of the same experts. Without experts it
          is `loss`.
        - `world`: all ranks.

    The first use of a group makes the groups of all axes. All ranks call it together.

    Raises:
        TypeError: A size is not an integer.
        ValueError: The product of the sizes is not the number of ranks, or `ep` does not divide `dp_shard x cp`.

    See also: [the order of techniques](../guides/which-technique.md#what-works-together).
    """

    dp_replicate: int = 1
    dp_shard: int = -1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    world_size: int = field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "world_size"):
            size, can_fill = getattr(self, name), name in ("dp_shard", "world_size")
            if size < 1 and not (can_fill and size == -1):
                raise ValueError(f"ParallelDims: expected {name} to be {'-1, or ' * can_fill}1 or more, got {size}")
        others = self.pp * self.dp_replicate * self.cp * self.tp
        world_size = self.world_size if self.world_size > 0 else _num_ranks()
        if world_size is None:
            world_size = others * max(self.dp_shard, 1)
        dp_shard = self.dp_shard if self.dp_shard > 0 else world_size // others
        if others * dp_shard != world_size:
            raise self._does_not_fit(world_size)
        object.__setattr__(self, "dp_shard", dp_shard)
        object.__setattr__(self, "world_size", world_size)
        fsdp = dp_shard * self.cp
        if fsdp % self.ep:
            divisors = " or ".join(str(size) for size in range(1, fsdp + 1) if fsdp % size == 0)
            raise ValueError(
                f"ParallelDims: expected ep to divide dp_shard {dp_shard} x cp {self.cp} = {fsdp}, whose ranks divide "
                f"the experts, got {self.ep}: take {divisors}"
            )

    def size(self, *axes: str) -> int:
        """Returns the number of ranks of a group along an axis, or along several together.

        >>> ParallelDims(cp=2, tp=2, world_size=8).size("fsdp", "tp")
        8
        """
        lattice, names = self._lattice(axes)
        return math.prod(lattice[name] for name in names)

    def ranks(self, *axes: str) -> list[list[int]]:
        """Returns the ranks of each group along an axis, or along several together, in the order of the ranks."""
        lattice, names = self._lattice(axes)
        return rank_groups(lattice, *names)

    def process_group(self, *axes: str) -> dist.ProcessGroup:
        """Returns this rank's group along an axis, or along several together; of one rank, a group of this rank.

        The first call makes the groups of all axes: all ranks call it together.

        Raises:
            RuntimeError: torch.distributed is not initialized.
            ValueError: The axis does not exist, or torch.distributed has a different number of ranks.
        """
        _, names = self._lattice(axes)
        groups = self._axis_groups()
        if (self, names) not in groups.by_axes:
            for names_together in (*_MADE_TOGETHER, axes):
                self._make(groups, self._lattice(names_together)[1])
        group = groups.by_axes[self, names] or dist.group.WORLD
        assert group is not None
        return group

    def get_mesh(self, dims: str | Sequence[str]) -> DeviceMesh:
        """Returns torch's `DeviceMesh` of an axis, or of several as its dimensions; all ranks call it together.

        It has the process groups that all techniques use. An axis of one rank is a dimension too, of size 1. For
        torch's own parallelism along several axes, take one mesh and slice it, because DTensor wants one root.

        Example:
            mesh = dims.get_mesh(["dp_replicate", "fsdp", "tp"])
            parallelize_module(model, mesh["tp"], plan)
            torch.distributed.fsdp.fully_shard(model, mesh=mesh["dp_replicate", "fsdp"])

        Raises:
            RuntimeError: torch.distributed is not initialized.
            ValueError: An axis does not exist, it is a part of a different axis, or the axes are not in the order of
                the ranks.
        """
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        groups = [self.process_group(name) for name in names]
        _, in_order = self._lattice(names)
        if in_order != tuple(base for name in names for base in _PRODUCTS.get(name, (name,))):
            raise ValueError(
                f"ParallelDims: expected dimensions of a mesh in the order of the ranks, got {', '.join(names)}. The "
                f"order is {', '.join(in_order)}"
            )
        ranks = next(ranks for ranks in self.ranks(*names) if dist.get_rank() in ranks)
        device_type = "cuda" if compat.backend_of() == "nccl" else "cpu"
        if len(names) == 1:
            return DeviceMesh.from_group(groups[0], device_type, mesh_dim_names=names)
        mesh = torch.tensor(ranks).view([self.size(name) for name in names])
        return DeviceMesh.from_group(groups, device_type, mesh=mesh, mesh_dim_names=names)

    def get_optional_mesh(self, dims: str | Sequence[str]) -> DeviceMesh | None:
        """Returns `get_mesh(dims)`, or None if one of the axes has one rank, as torchtitan has it."""
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        return None if any(self.size(name) == 1 for name in names) else self.get_mesh(dims)

    @property
    def world_mesh(self) -> DeviceMesh:
        """The `DeviceMesh` of all ranks, with a dimension for each of `pp`, `dp_replicate`, `dp_shard`, `cp`, `tp`.

        Dimensions of one rank are left out, except `dp_shard` if there is no other.
        """
        return self.get_mesh([name for name in _DENSE if self.size(name) > 1] or "dp_shard")

    def _does_not_fit(self, world_size: int) -> ValueError:
        """The error of sizes whose product is not the number of ranks."""
        fills = self.dp_shard < 0
        sizes = {name: getattr(self, name) for name in _DENSE if not (fills and name == "dp_shard")}
        product, others = math.prod(sizes.values()), math.prod(sizes.values()) // sizes.get("dp_shard", 1)
        factors = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
        factors += f" = {product}" * (" x " in factors)
        relation, hint = "be", "choose sizes whose product is the number of ranks"
        if fills:
            relation, hint = "divide", "choose sizes whose product divides the number of ranks"
        elif world_size % others == 0:
            hint = "leave dp_shard out, which takes the ranks that the other axes leave"
        return ValueError(
            f"ParallelDims: expected {factors} to {relation} the number of ranks, got {world_size} ranks: start "
            f"{product} ranks, or {hint}"
        )

    def _lattice(self, axes: Sequence[str]) -> tuple[dict[str, int], tuple[str, ...]]:
        """The sizes of the axes that the ranks are counted by, the slowest first, and those among them that are meant.

        Raises:
            ValueError: An axis has another name, or axes divide the same ranks in two ways.
        """
        names: list[str] = []
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"ParallelDims has no axis {axis!r}: {did_you_mean(axis, AXES, ', '.join(AXES))}")
            names += _PRODUCTS.get(axis, (axis,))
        expert_names = {"efsdp", "ep"}.intersection(names)
        layout = _EXPERTS if expert_names else _DENSE
        if len(set(names)) < len(names) or not set(names).issubset(layout):
            raise ValueError(
                f"ParallelDims: the axes {', '.join(axes)} have ranks in common: take axes that do not contain each "
                "other, because fsdp is dp_shard x cp, and efsdp x ep is the same ranks"
            )
        sizes = {"efsdp": self.dp_shard * self.cp // self.ep}
        lattice = {name: sizes[name] if name in sizes else int(getattr(self, name)) for name in layout}
        return lattice, tuple(name for name in layout if name in names)

    def _axis_groups(self) -> _AxisGroups:
        if not dist.is_initialized():
            raise RuntimeError(
                f"{self} needs process groups, and torch.distributed is not initialized: call "
                "scale_core.launch.init_distributed() or torch.distributed.init_process_group() first"
            )
        if self.world_size != dist.get_world_size():
            raise ValueError(
                f"{self} is of {self.world_size} ranks, but torch.distributed has {dist.get_world_size()}: leave "
                "world_size and dp_shard out, so that they follow the number of ranks"
            )
        assert dist.group.WORLD is not None
        state = group_state(dist.group.WORLD)
        if state.is_of_parent:
            raise forked_error()
        return state.get_or_create(_AxisGroups)

    def _make(self, groups: _AxisGroups, names: tuple[str, ...]) -> None:
        if (self, names) in groups.by_axes:
            return
        partition = rank_groups(self._lattice(names)[0], *names)
        if len(partition) == 1:
            groups.by_axes[self, names] = None
        elif len(partition[0]) > 1:
            groups.by_axes[self, names] = new_group_along(partition, groups.new_groups)
        else:
            groups.this_rank = groups.this_rank or compat.new_group_of_members([dist.get_rank()], None)
            groups.by_axes[self, names] = groups.this_rank


def _num_ranks() -> int | None:
    """The number of ranks of torch.distributed, or of the launcher; None where there is neither."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    count = os.environ.get("WORLD_SIZE", "")
    return int(count) if count.isdecimal() else None
