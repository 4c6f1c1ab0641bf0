"""The options of one unit, from the arguments of `fully_shard`, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from scale_core import compat
from scale_core.comm.group import GroupLike
from scale_core.comm.mesh import ParallelDims
from scale_core.consistency.contract import Contract
from scale_core.flat.config import DevicePolicy, DtypePolicy, ShardGroups
from scale_core.tree import map_tensors
from scale_fsdp.mesh_info import MeshInfo
from scale_fsdp.options import ShardOptions

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy


@dataclass(frozen=True)
class UnitPrecision:
    """The dtypes of one unit, as torch's `MixedPrecisionPolicy` says them, and the dtype of its module's buffers.

    The local shards, their gradients and so the optimizer keep the dtype that the parameters were built in. None leaves
    things as they are.

    Attributes:
        param_dtype: Of the gathered parameters, of the module's floating-point inputs, and so of the computation.
        reduce_dtype: Of the gradients on their way between ranks; None is `param_dtype`, or with torch 2.15 and later
            the parameter's own dtype, as FSDP2 has it there.
        output_dtype: Of the module's floating-point outputs.
        cast_forward_inputs: Whether inputs are cast to `param_dtype`; "root" is where the model is entered alone, as
            FairScale did, unless its units have several dtypes.
        buffer_dtype: Of the module's floating-point buffers.
        param_dtype_override_fn: Returns the `param_dtype` of one parameter, or None for the unit's; torch 2.15 has it.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool | Literal["root"] = True
    buffer_dtype: torch.dtype | None = None
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            is_dtype = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            if name.endswith("dtype") and dtype is not None and not is_dtype:
                raise ValueError(f"{name}: expected a floating-point torch.dtype, got {dtype!r}")

    def dtypes_of(self, param: nn.Parameter, name: str) -> DtypePolicy:
        """Returns in which dtypes a parameter is gathered, and its gradient reduced."""
        if not param.is_floating_point():
            return DtypePolicy()
        override = None if self.param_dtype_override_fn is None else self.param_dtype_override_fn(param)
        if override not in (None, self.param_dtype, param.dtype):
            raise ValueError(
                f"{name}: expected param_dtype_override_fn to return None, {self.param_dtype} (param_dtype) or "
                f"{param.dtype} (the parameter's own dtype), got {override!r}"
            )
        # Without param_dtype all parameters are computed with in their own dtype, also after model.float().
        compute = None if self.param_dtype is None else override or self.param_dtype
        return DtypePolicy(compute, self.reduce_dtype, reduces_as_stored=compat.reduces_in_param_dtype())


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Returns tensors in containers of any kind, floating-point ones in this dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def resolve_precision(mp_policy: MixedPrecisionPolicy | None, buffer_dtype: torch.dtype | None = None) -> UnitPrecision:
    """Returns the dtypes behind the arguments of `fully_shard`."""
    if mp_policy is None:
        return UnitPrecision(buffer_dtype=buffer_dtype)
    from torch.distributed.fsdp import MixedPrecisionPolicy  # Loads all of torch's FSDP: whoever has one has done so.

    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"mp_policy: expected a torch.distributed.fsdp.MixedPrecisionPolicy, got {mp_policy!r}: write "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)"
        )
    dtypes = mp_policy.param_dtype, mp_policy.reduce_dtype, mp_policy.output_dtype
    override = getattr(mp_policy, "param_dtype_override_fn", None)
    return UnitPrecision(*dtypes, mp_policy.cast_forward_inputs, buffer_dtype, override)


@dataclass(frozen=True)
class DevicePlacement:
    """On which devices a unit's shards, computation and reduced gradients are."""

    compute: torch.device | None = None  # None is where its parameters are
    params_on_host: bool = False
    grads_on_host: bool = False  # at once, or only when the backward pass is over
    pin_memory: bool = True  # of shards on the host that go to a GPU

    def stays_on_host(self, modules: Sequence[nn.Module], ranks: MeshInfo) -> bool:
        """Whether a model computes on the host for want of a device, though its ranks communicate by accelerators."""
        moves_host_tensors = ranks.whole.backend in ("gloo", "fake", "none") or ranks.whole.state.moves_host_tensors
        if self.compute is not None or moves_host_tensors:
            return False
        params = [param for module in modules for param in module.parameters()]
        return bool(params) and all(param.device.type == "cpu" for param in params)

    def devices_for(self, params: torch.device) -> DevicePolicy:
        """Returns where the buffers of parameters live that are on this device now."""
        compute = self.compute or params
        host = torch.device("cpu")
        return DevicePolicy(
            shard=host if self.params_on_host else compute,
            compute=compute,
            reduced=host if self.grads_on_host else compute,
            pin_memory=self.pin_memory,
        )


def resolve_placement(
    offload_policy: OffloadPolicy | None, compute_device: torch.device | str | None, mesh: GroupLike, ranks: MeshInfo
) -> DevicePlacement:
    """Returns the devices behind the arguments of `fully_shard`."""
    if compute_device is None and isinstance(mesh, DeviceMesh) and mesh.device_type != "cpu":
        compute_device = mesh.device_type
    if compute_device is None and isinstance(mesh, ParallelDims) and ranks.whole.backend == "nccl":
        compute_device = "cuda"
    if offload_policy is None:
        return placement_of(False, False, compute_device, ranks)
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(
            f"offload_policy: expected a torch.distributed.fsdp.CPUOffloadPolicy or OffloadPolicy, got "
            f"{offload_policy!r}: write offload_policy=CPUOffloadPolicy() to keep shards, gradients and the "
            "optimizer's state on the host, or leave it out"
        )
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    pins = offload_policy.pin_memory if isinstance(offload_policy, CPUOffloadPolicy) else True
    return placement_of(offloads, offloads, compute_device, ranks, pin_memory=pins)


def placement_of(
    params_on_host: bool,
    grads_on_host: bool,
    compute_device: torch.device | str | None,
    ranks: MeshInfo,
    *,
    pin_memory: bool = True,
) -> DevicePlacement:
    """Returns the devices; parameters kept on the host compute on the accelerator that the ranks communicate by."""
    compute = torch.device(compute_device) if compute_device is not None else None
    if compute is None and params_on_host and ranks.whole.backend != "gloo":
        compute = compat.accelerator()
    if compute is not None:
        compute = compat.with_index(compute)  # It is compared with the devices of tensors.
    return DevicePlacement(compute, params_on_host, grads_on_host, pin_memory)


@dataclass(frozen=True)
class StateDictConfig:
    """The content of `state_dict()` of a sharded module."""

    device: torch.device | None = None  # of its tensors; None is where the shards are
    rank_0_only: bool = False  # the other ranks get an empty dict


def resolve_state_dict_config(
    state_dict_device: torch.device | str | None, state_dict_on_rank_0_only: bool
) -> StateDictConfig:
    """Returns the form of `state_dict()` behind FairScale's two arguments."""
    if not isinstance(state_dict_on_rank_0_only, bool):
        raise TypeError(f"state_dict_on_rank_0_only: expected True or False, got {state_dict_on_rank_0_only!r}")
    device = None if state_dict_device is None else torch.device(state_dict_device)
    return StateDictConfig(device, state_dict_on_rank_0_only)


@dataclass(frozen=True, kw_only=True)
class UnitOptions(ShardOptions):
    """How one unit is sharded: its `ShardOptions`, and what the other arguments of `fully_shard` mean on this rank."""

    mesh_info: MeshInfo
    precision: UnitPrecision
    placement: DevicePlacement
    reshard_after_forward: bool | int | None = None  # None: unless it is the unit that is called first
    state_dict_config: StateDictConfig = StateDictConfig()

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, int | None):
            raise TypeError(
                f"reshard_after_forward: expected a bool, a number of ranks or None, got {self.reshard_after_forward!r}"
            )
        self.mesh_info.check_reshard_after_forward(self.reshard_after_forward)
        if self.communication is not None:
            self.communication.check(self.mesh_info)

    @classmethod
    def of(
        cls,
        options: ShardOptions,
        mesh_info: MeshInfo,
        precision: UnitPrecision,
        placement: DevicePlacement,
        **others: Any,
    ) -> UnitOptions:
        """Returns the options of a unit. `init` stays behind: it is called once, and often can't be pickled."""
        shared = {field.name: getattr(options, field.name) for field in fields(ShardOptions)} | {"init": None}
        return cls(**shared, mesh_info=mesh_info, precision=precision, placement=placement, **others)

    @property
    def communication_line(self) -> str:
        """The settings that decide which groups of ranks are made and what they send; equal on all ranks."""
        part = None if isinstance(self.reshard_after_forward, bool) else self.reshard_after_forward
        return f"reshard_after_forward={part}, communication={self.communication}"

    def check_groups(self) -> None:
        """Compares between ranks the settings of the groups in `buffer_groups`; sends nothing if there are none.

        Raises:
            ContractError: They say it differently.
        """
        has_part = not isinstance(self.reshard_after_forward, bool | None)
        if has_part or (self.communication is not None and self.communication.node_size is not None):
            contract = Contract(self.mesh_info.whole, self.limit_seconds)
            contract.check_equal("how fully_shard groups the ranks", [self.communication_line])

    def buffer_groups(self) -> ShardGroups:
        """Returns the groups of the unit's buffers; the first call makes them, on all ranks together."""
        node_size = None if self.communication is None else self.communication.node_size
        return self.mesh_info.buffer_groups(self.reshard_after_forward, node_size)

    def device_for(self, params: torch.device) -> torch.device:
        """Returns where parameters get memory that are on this device now: those on meta, where the unit computes.

        That is this rank's accelerator, if there is one that the ranks communicate by.
        """
        if params.type != "meta":
            return params
        accelerator = compat.accelerator() if self.mesh_info.whole.backend != "gloo" else None
        return self.placement.compute or accelerator or torch.device("cpu")
