"""The options of one unit, from the arguments of `fully_shard`, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from scale_core import compat
from scale_core.divergence import check_interval
from scale_core.flat.buffer import DevicePolicy
from scale_core.flat.layout import Atom
from scale_core.tree import map_tensors
from scale_fsdp.mesh_info import MeshInfo


@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes of one unit; None leaves things as they are.

    The local shards, their gradients and so the optimizer keep the dtype that the parameters were built in.

    Attributes:
        param_dtype: Of the gathered parameters, of the floating-point inputs of the outermost unit, and so of the
            computation.
        reduce_dtype: Of the gradients on their way between ranks; None is `param_dtype`.
        output_dtype: Of the module's floating-point outputs.
        buffer_dtype: Of the module's floating-point buffers. None is right nearly always: rotary frequencies and
            running statistics don't survive half precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name, dtype in vars(self).items():
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise ValueError(f"MixedPrecision({name}=...): expected a floating-point torch.dtype, got {dtype!r}")


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Returns tensors in containers of any kind, those of floating-point numbers in this dtype."""
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)


def resolve_precision(
    mixed_precision: bool | MixedPrecision,
    *,
    compute_dtype: torch.dtype | None = None,
    buffer_dtype: torch.dtype | None = None,
    fp32_reduce_scatter: bool | None = None,
) -> MixedPrecision:
    """Returns the policy behind the arguments of `fully_shard`; True is fp16 parameters and reduction."""
    if isinstance(mixed_precision, MixedPrecision):
        if any(value is not None for value in (compute_dtype, buffer_dtype, fp32_reduce_scatter)):
            raise ValueError(
                "a MixedPrecision policy was given, and compute_dtype, buffer_dtype or fp32_reduce_scatter beside it: "
                "say it in the policy, MixedPrecision(param_dtype=..., reduce_dtype=..., buffer_dtype=...)"
            )
        return mixed_precision
    if not isinstance(mixed_precision, bool):
        raise TypeError(f"mixed_precision: expected a bool or a MixedPrecision, got {type(mixed_precision).__name__}")
    if not mixed_precision:
        if fp32_reduce_scatter:
            raise ValueError("fp32_reduce_scatter requires mixed_precision=True: without it gradients keep their dtype")
        return MixedPrecision(param_dtype=compute_dtype, buffer_dtype=buffer_dtype)
    param_dtype = compute_dtype or torch.float16
    reduce_dtype = torch.float32 if fp32_reduce_scatter else param_dtype
    return MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype, buffer_dtype=buffer_dtype)


@dataclass(frozen=True)
class DevicePlacement:
    """On which devices a unit's shards, computation and reduced gradients are."""

    compute: torch.device | None = None  # None is where its parameters are
    params_on_host: bool = False
    grads_on_host: bool = False  # at once, or only when the backward pass is over

    def devices_for(self, params: torch.device) -> DevicePolicy:
        """Returns where the buffers of parameters live that are on this device now."""
        compute = self.compute or params
        host = torch.device("cpu")
        return DevicePolicy(
            shard=host if self.params_on_host else compute,
            compute=compute,
            reduced=host if self.grads_on_host else compute,
        )


def resolve_placement(
    move_params_to_cpu: bool,
    move_grads_to_cpu: bool | None,
    compute_device: torch.device | str | None,
    mesh_info: MeshInfo,
) -> DevicePlacement:
    """Returns the devices behind the arguments of `fully_shard`."""
    for name, value in (("move_params_to_cpu", move_params_to_cpu), ("move_grads_to_cpu", move_grads_to_cpu)):
        if not isinstance(value, bool | None):
            raise TypeError(f"{name}: expected True or False, got {value!r}")
    compute = torch.device(compute_device) if compute_device is not None else None
    if compute is None and move_params_to_cpu and mesh_info.whole.backend != "gloo":
        compute = compat.accelerator()
    if compute is not None and str(compute) == "cuda":
        compute = compat.accelerator() or compute  # Tensors say which one they are on, and are compared with this.
    return DevicePlacement(
        compute, move_params_to_cpu, move_params_to_cpu if move_grads_to_cpu is None else move_grads_to_cpu
    )


@dataclass(frozen=True)
class StateDictConfig:
    """What `state_dict()` of a sharded module gives."""

    device: torch.device | None = None  # of its tensors; None is where the shards are
    rank_0_only: bool = False  # the other ranks get an empty dict


def resolve_state_dict_config(
    state_dict_device: torch.device | str | None, state_dict_on_rank_0_only: bool
) -> StateDictConfig:
    """Returns the form of `state_dict()` behind the arguments of `fully_shard`."""
    if not isinstance(state_dict_on_rank_0_only, bool):
        raise TypeError(f"state_dict_on_rank_0_only: expected True or False, got {state_dict_on_rank_0_only!r}")
    device = None if state_dict_device is None else torch.device(state_dict_device)
    return StateDictConfig(device, state_dict_on_rank_0_only)


AtomChoice = Atom | Callable[[str, tuple[int, ...]], Atom]


@dataclass(frozen=True)
class UnitOptions:
    """How one unit is sharded; see `fully_shard`."""

    mesh_info: MeshInfo
    precision: MixedPrecision
    placement: DevicePlacement
    reshard_after_forward: bool | int = True
    flatten: bool = False
    atom: AtomChoice = "auto"
    limit_seconds: float | None = None  # the outermost unit's counts
    state_dict_config: StateDictConfig = StateDictConfig()
    error_if_nonfinite: bool = False  # the outermost unit's counts
    check_replicas_every: int | None = None  # the outermost unit's counts

    def __post_init__(self) -> None:
        if not isinstance(self.reshard_after_forward, int):
            raise TypeError(
                f"reshard_after_forward: expected a bool or a number of ranks, got {self.reshard_after_forward!r}"
            )
        self.mesh_info.check_reshard_after_forward(self.reshard_after_forward)
        check_interval(self.check_replicas_every)
        if not isinstance(self.error_if_nonfinite, bool):
            raise TypeError(f"error_if_nonfinite: expected True or False, got {self.error_if_nonfinite!r}")

    def device_for(self, params: torch.device) -> torch.device:
        """Returns where parameters get memory that are on this device now: those on meta, where the unit computes.

        That is this rank's accelerator, if there is one that the ranks communicate by.
        """
        if params.type != "meta":
            return params
        accelerator = compat.accelerator() if self.mesh_info.whole.backend != "gloo" else None
        return self.placement.compute or accelerator or torch.device("cpu")
