"""Blocks whose layers are divided between ranks, beside whatever spreads the model over the others.

The ranks stand in two axes. Those of the tensor axis, which are next to each other, see the same batch and divide the
layers of each block; those of the data axis see other parts of the batch. The embedding of bytes is small, and stays
whole on each rank.
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
"""How the layers of a block are divided: two sums in its forward and two in its backward pass."""

_RULE = AttentionRule("scale-train's GPT", fused=("qkv",), heads=("heads",))


class Axes(NamedTuple):
    """The ranks in two axes, as one of them sees them.

    Attributes:
        data: Those that see other parts of the batch.
        tensor: Those that divide the layers.
    """

    data: Group
    tensor: Group


def two_axes(group: Group, num_tensor: int) -> Axes:
    """Returns the axes of this rank; all ranks of the group call it together.

    Args:
        group: All ranks, `num_tensor` of which divide a layer each time.
        num_tensor: A divisor of their number.
    """
    if num_tensor == 1:
        return Axes(group, Group())
    if num_tensor == group.size:
        return Axes(Group(), group)
    numbers = torch.tensor(group.ranks).view(-1, num_tensor)
    mesh = DeviceMesh("cpu" if group.backend == "gloo" else "cuda", numbers, mesh_dim_names=("data", "tensor"))
    return Axes(group_of(mesh["data"]), group_of(mesh["tensor"]))


def divide_blocks(model: GPT, axes: Axes, *, sequence_parallel: bool, overlap_pieces: int | None = None) -> None:
    """Divides the blocks of a model, in place, that is whole and equal on all ranks."""
    if axes.tensor.size > 1:
        parallelize(
            model,
            PLAN,
            axes.tensor,
            sequence_parallel=sequence_parallel,
            overlap_pieces=overlap_pieces,
            attention_rules=(_RULE,),
        )
