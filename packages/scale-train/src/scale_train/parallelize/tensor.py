"""Tensor parallelism of the blocks on one axis of a mesh; the other axis is data parallel.

Ranks of the tensor axis, which are next to each other, see the same batch. The embedding of bytes is small, and is
replicated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from scale_core.comm.group import Group, group_of
from scale_tp.attention_heads import AttentionRule
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import Plan, Style
from scale_train.model import GPT

PLAN: Plan = {
    "blocks.*.attention.qkv": Style("outputs", output="part", stacked=3),
    "blocks.*.attention.out": "rowwise",
    "blocks.*.feed_in": "colwise",
    "blocks.*.feed_out": "rowwise",
    r"blocks\.\d+\.(attention|feed)_norm": "replicate",
}
"""Two all-reduces in the forward of a block and two in its backward."""

_RULE = AttentionRule("scale-train's GPT", fused=("qkv",), heads=("heads",))


class MeshAxes(NamedTuple):
    """The groups of a rank on the axes of the mesh."""

    data: Group
    tensor: Group


def mesh_axes(group: Group, num_tensor: int) -> MeshAxes:
    """Returns the axes of this rank, `num_tensor` ranks on the tensor axis; called on all ranks."""
    if num_tensor == 1:
        return MeshAxes(group, Group())
    if num_tensor == group.size:
        return MeshAxes(Group(), group)
    numbers = torch.tensor(group.ranks).view(-1, num_tensor)
    mesh = DeviceMesh("cpu" if group.backend == "gloo" else "cuda", numbers, mesh_dim_names=("data", "tensor"))
    return MeshAxes(group_of(mesh["data"]), group_of(mesh["tensor"]))


def parallelize_blocks(
    model: GPT, axes: MeshAxes, *, sequence_parallel: bool, overlap_pieces: int | None = None
) -> None:
    """Shards the layers of the blocks, in place, of a full model that is equal on all ranks."""
    if axes.tensor.size > 1:
        parallelize(
            model,
            PLAN,
            axes.tensor,
            sequence_parallel=sequence_parallel,
            overlap_pieces=overlap_pieces,
            attention_rules=(_RULE,),
        )
