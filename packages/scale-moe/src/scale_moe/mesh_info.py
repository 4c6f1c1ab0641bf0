"""The ranks of a layer of experts: those that divide the experts, and those that divide the width of each one.

With a mesh of two axes, (expert, tensor), an expert is on the ranks of one row: each has some of its hidden features,
and their partial outputs are summed (Megatron's expert tensor parallelism). These ranks have the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torch.distributed.device_mesh import DeviceMesh

from scale_core.comm.group import Group, GroupLike
from scale_core.comm.subgroups import two_axes_of
from scale_core.compat import ranks_of_mesh


class ExpertMesh(NamedTuple):
    """The ranks of one layer of experts."""

    expert: Group  # have other experts, and tokens of their own
    tensor: Group  # have other features of the same experts, and the same tokens; of size 1 without a second axis
    whole: Group  # all of them, in row-major order

    @property
    def shape(self) -> str:
        """Its sizes, for messages."""
        return f"{self.expert.size}" if self.tensor.size == 1 else f"{self.expert.size} x {self.tensor.size}"


ExpertMeshLike: TypeAlias = "GroupLike | ExpertMesh"


def resolve_expert_mesh(process_group: ExpertMeshLike) -> ExpertMesh:
    """Returns the ranks of a group, or of a mesh of one dimension (expert) or two (expert, tensor).

    A `ParallelDims` has them as its axes `ep` and `tp`. All ranks of a mesh call it together. It also takes its own
    result: for many layers over one mesh.

    Raises:
        ValueError: The mesh has more dimensions, or its ranks stand in another order.
    """
    if isinstance(process_group, ExpertMesh):
        return process_group
    mesh = ExpertMesh(*two_axes_of(process_group, ("expert", "tensor"), alone="expert", axes=("ep", "tp")))
    if isinstance(process_group, DeviceMesh) and mesh.whole.ranks != ranks_of_mesh(process_group):
        raise ValueError(
            f"expected a DeviceMesh whose ranks stand in row-major order, got {process_group.mesh.tolist()}: build it "
            'by init_device_mesh(device, (expert, tensor), mesh_dim_names=("expert", "tensor"))'
        )
    return mesh
