"""Parameters that the user has made DTensors, as torch's `parallelize_module` does, and that are sharded further.

The local tensor is sharded, a piece of the full parameter as in a tensor parallel layer: a `Shard`
says which. Modules compute with a DTensor around the gathered piece.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from scale_core import compat
from scale_core.comm.group import Group, group_of, mesh_dim_group
from scale_core.parameters import copy_attributes
from scale_core.shard import Axis, Placement, Shard


def is_dtensor(tensor: object) -> bool:
    """Whether it is a DTensor; does not load torch's package of them."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def full_value(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, which all ranks of its mesh gather together, or a plain tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    dtensor: Any = tensor.detach()
    return compat.waited(dtensor.full_tensor())


@dataclass(frozen=True)
class DTensorSpec:
    """How a DTensor is made around this rank's local tensor.

    Attributes:
        mesh: Its mesh.
        placements: How each dimension of the mesh holds it: torch's `Shard` along one of them, `Replicate` otherwise.
        shape: The shape of the full tensor.
        stride: The stride of the full tensor.
    """

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, name: str) -> Self:
        """Returns the spec of a DTensor.

        Raises:
            TypeError: It is sharded along several dimensions of its mesh, in another way, or a partial sum.
        """
        dtensor: Any = tensor
        plain = [placement for placement in dtensor.placements if not placement.is_replicate()]
        if len(plain) > 1 or any(type(placement).__name__ != "Shard" for placement in plain):
            raise TypeError(
                f"'{name}' is a DTensor with the placements {tuple(dtensor.placements)} over the mesh dimensions "
                f"{dtensor.device_mesh.mesh_dim_names}: expected Shard along one of them at most and Replicate along "
                "the others. Parallelize the module over the tensor parallel dimension alone, mesh['tp'], and give "
                "fully_shard the data parallel one, mesh['dp']"
            )
        return cls(dtensor.device_mesh, tuple(dtensor.placements), dtensor.shape, dtensor.stride())

    def __deepcopy__(self, memo: object) -> Self:
        """The same: a mesh is of this process and can't be copied."""
        return self

    def shard(self, name: str) -> Shard:
        """Returns which piece of the full parameter this rank's local tensor is."""
        axes: list[Axis] = []
        ranges = [((0, size),) for size in self.shape]
        first_copy = True
        for number, placement in enumerate(self.placements):
            group = mesh_dim_group(self.mesh, number)
            if placement.is_replicate():
                axes.append(Axis(group, Placement.REPLICATE))
                first_copy = first_copy and group.rank == 0
            else:
                axes.append(Axis(group, Placement.SHARD))
                ranges[placement.dim] = (_chunk(self.shape[placement.dim], group),)
        piece = Shard.of_ranges(name, tuple(self.shape), tuple(ranges), tuple(axes))
        return replace(piece, first_copy=first_copy)

    def wrap(self, local: Tensor) -> Tensor:
        """Returns a DTensor around a local tensor, whose memory it shares; gradients reach that."""
        with torch.enable_grad():  # Also in a backward pass, whose recomputation takes gradients of it.
            wrapped: Tensor = _Wrap.apply(local, self)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return wrapped


class _Wrap(torch.autograd.Function):
    """A DTensor around a local tensor; its gradient comes in the parameter's own placements."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> Tensor:
        from torch.distributed.tensor import DTensor

        ctx.spec = spec
        ctx.set_materialize_grads(False)
        dtensor: Tensor = DTensor.from_local(
            local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
        )
        return dtensor

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        return (None if grad is None else local_gradient(grad, ctx.spec.placements)), None


def local_gradient(grad: Any, placements: Sequence[Any]) -> Tensor:
    """Returns the local tensor of a DTensor gradient in its parameter's placements; sums partial ones.

    All ranks of its mesh call it together.
    """
    from torch.distributed.tensor import Replicate

    grad_placements = tuple(Replicate() if placement.is_partial() else placement for placement in placements)
    if tuple(grad.placements) != grad_placements:
        grad = grad.redistribute(placements=grad_placements)
    return compat.waited(grad.to_local())


def sharding_groups(dtensor: Any) -> tuple[Group, ...]:
    """Returns the groups of several ranks between which a DTensor's elements are divided."""
    groups = (
        group_of(dtensor.device_mesh.get_group(number))
        for number, placement in enumerate(dtensor.placements)
        if not (placement.is_replicate() or placement.is_partial())
    )
    return tuple(group for group in groups if group.size > 1)


def local_parameter(param: nn.Parameter) -> nn.Parameter:
    """Returns a plain parameter of a DTensor's local tensor, whose memory it shares."""
    dtensor: Any = param.detach()
    local = nn.Parameter(compat.waited(dtensor.to_local()), param.requires_grad)
    copy_attributes(param, local, leave_out=("_spec", "_local_tensor"))
    return local


def _chunk(size: int, group: Group) -> tuple[int, int]:
    """This rank's range of a dimension that is cut as `torch.chunk` does."""
    length = -(-size // group.size)
    return min(length * group.rank, size), min(length * (group.rank + 1), size)
