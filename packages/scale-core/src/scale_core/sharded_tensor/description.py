"""The description of sharded tensors: their text, and torch's words for how ranks hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

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

    first_axis = shard.gathered
    result: list[Any] = []
    for number, axis in enumerate(shard.axes):
        if axis.placement is not Placement.SHARD:
            result.append(Replicate())
        else:
            result.append(ShardDim(0 if first_axis and number == 0 else dim_of(shard)))
    return tuple(result)


def device_mesh(shard: Shard) -> DeviceMesh:
    """A mesh of the ranks that share it."""
    groups: list[Any] = [axis.group.process_group for axis in shard.axes]
    device = "cuda" if any(axis.group.backend == "nccl" for axis in shard.axes) else "cpu"
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], device)
    raise ShardedTensorError(
        f"device_mesh of {shard.title}: the tensor has {len(groups)} axes of ranks. Use the mesh that you have passed "
        "to fully_shard"
    )
