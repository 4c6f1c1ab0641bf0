"""The description of sharded tensors: their text, and torch's words for how ranks hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from scale_core import compat
from scale_core.comm.group import group_of
from scale_core.errors import ShardedTensorError
from scale_core.shard import Placement, Shard


def describe(kind: str, local: Tensor, shard: Shard) -> str:
    """The text of a sharded tensor: its full tensor, and this rank's elements."""
    part = f"elements {shard.start:,} to {shard.stop:,}" if not shard.ranges else f"indices {shard.ranges}"
    return f"{kind}({shard.title}, full shape {list(shard.shape)}, {part} of this rank: {local.detach()!r})"


def placements(shard: Shard) -> tuple[Any, ...]:
    """torch's placement for each axis."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as ShardDim

    def dim_of(shard: Shard) -> int:
        all_indices = [((0, size),) for size in shard.shape]
        return next((dim for dim, indices in enumerate(shard.ranges) if indices != all_indices[dim]), 0)

    is_of_unit = shard.gathered  # A unit cuts along dimension 0; its axes are the first ones.
    result: list[Any] = []
    for axis in shard.axes:
        if axis.placement is not Placement.SHARD:
            result.append(Replicate())
        else:
            result.append(ShardDim(0 if is_of_unit else dim_of(shard)))
            is_of_unit = False
    return tuple(result)


def device_mesh(shard: Shard) -> DeviceMesh:
    """A mesh of the ranks that share it: for each axis one dimension of the user's mesh, in torch's order."""
    groups = [axis.group for axis in shard.axes]
    dims = [group.mesh_dim for group in groups if group.mesh_dim is not None]
    if dims and len(dims) == len(groups):
        mesh = dims[0].mesh
        if dims == [(mesh, number) for number in range(mesh.ndim)]:
            return mesh
        names = tuple(name for dim in dims for name in (dim.mesh.mesh_dim_names or ())[dim.number : dim.number + 1])
        ranks = {name: group.ranks for name, group in zip(names, groups, strict=False)}
        for root in (compat.root_mesh(dim.mesh) for dim in dims):  # torch keeps the first of equal meshes.
            has_names = len(ranks) == len(groups) and ranks.keys() <= set(root.mesh_dim_names or ())
            if has_names and all(group_of(root.get_group(name)).ranks == ranks[name] for name in names):
                try:
                    part: DeviceMesh = root[names]
                    return part
                except (KeyError, RuntimeError):  # torch slices a mesh in the order of its axes alone.
                    pass
    if len(groups) == 1:
        device = "cuda" if groups[0].backend == "nccl" else "cpu"
        process_group: Any = groups[0].process_group
        return DeviceMesh.from_group(process_group, device)
    raise ShardedTensorError(
        f"device_mesh of {shard.title}: {len(groups)} axes of ranks share the tensor, and they are not dimensions of "
        "one DeviceMesh in its order. Use the process groups that you have passed, or pass parts of one mesh: "
        'mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), then mesh["dp"] to fully_shard and '
        'mesh["tp"] to the layers'
    )
