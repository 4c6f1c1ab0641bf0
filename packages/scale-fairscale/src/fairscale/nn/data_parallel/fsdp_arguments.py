"""The arguments of FairScale's wrapper: what they are in scale-fsdp, and which have no effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fairscale._warnings import warn_argument
from fairscale.internal.process_group import ProcessGroupName, unwrap_process_group

# Arguments that tuned FairScale's own machinery: their default there, and what holds here.
_WITHOUT_EFFECT = {
    "process_group_reduce_scatter": (None, "all collectives go over process_group"),
    "disable_reshard_on_root": (True, "the unit that the model is entered by keeps its parameters"),
    "bucket_cap_mb": (25, "each unit's gradients are reduced together"),
    "no_broadcast_optim_state": (False, "gather_full_optim_state_dict gathers what each rank has"),
    "clear_autocast_cache": (False, "weights are cast by the unit, and not by autocast"),
    "verbose": (False, "scale_fsdp.describe(model) tells what is where"),
    "gradient_predivide_factor": (
        None,
        "gradients are summed and then divided, in fp32 with fp32_reduce_scatter=True or on gloo",
    ),
}


@dataclass(frozen=True)
class WrapperArguments:
    """Those that have an effect, as FairScale's wrapper takes them."""

    process_group: Any
    reshard_after_forward: bool
    mixed_precision: bool
    fp32_reduce_scatter: bool | None
    flatten_parameters: bool
    move_params_to_cpu: bool
    cpu_offload: bool
    compute_dtype: torch.dtype | None
    buffer_dtype: torch.dtype | None
    move_grads_to_cpu: bool | None
    compute_device: torch.device | None
    state_dict_device: torch.device | None
    state_dict_on_rank_0_only: bool
    force_input_to_fp32: bool

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> WrapperArguments:
        """Those among all that a wrapper was given, by name; warns of the others."""
        warn_of_arguments(given)
        return cls(**{name: given[name] for name in cls.__dataclass_fields__})

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype of the computation, as FairScale derives it."""
        return self.compute_dtype or (torch.float16 if self.mixed_precision else torch.float32)

    @property
    def is_offloaded(self) -> bool:
        """Whether shards are on the CPU."""
        return self.move_params_to_cpu or self.cpu_offload

    def options(self) -> dict[str, Any]:
        """The arguments of `scale_fsdp.FullyShardedDataParallel`."""
        computed_in = self.compute_dtype if self.mixed_precision else None  # Else only what outer wrappers cast to.
        if self.force_input_to_fp32 and not self.mixed_precision:
            computed_in = torch.float32
        return {
            "process_group": unwrap_process_group(self.process_group),
            "reshard_after_forward": self.reshard_after_forward,
            "mixed_precision": self.mixed_precision,
            "flatten_parameters": self.flatten_parameters,
            "move_params_to_cpu": self.is_offloaded,
            "move_grads_to_cpu": self.move_grads_to_cpu,
            "compute_device": self.compute_device,
            "state_dict_device": self.state_dict_device,
            "state_dict_on_rank_0_only": self.state_dict_on_rank_0_only,
            "compute_dtype": computed_in,
            "buffer_dtype": self.buffer_dtype or (self.computes_in if self.mixed_precision else None),
            "fp32_reduce_scatter": self.fp32_reduce_scatter,
            "sync_module_states": False,
        }


def warn_of_arguments(given: Mapping[str, Any]) -> None:
    """Warns of the arguments that have no effect, or another name.

    Raises:
        TypeError: `process_group_reduce_scatter` is not a group.
    """
    group = given["process_group_reduce_scatter"]
    if group is not None and not _is_group(group):
        raise TypeError(
            f"unsupported type for reduce_scatter process group: {type(group).__name__}; "
            "leave process_group_reduce_scatter out: all collectives go over process_group"
        )
    for name, (default, now) in _WITHOUT_EFFECT.items():
        if given[name] != default and not isinstance(given[name], ProcessGroupName):
            warn_argument("FullyShardedDataParallel", name, f"has no effect, leave it out: {now}")
    if given["cpu_offload"]:
        warn_argument("FullyShardedDataParallel", "cpu_offload", "write move_params_to_cpu=True")


def _is_group(value: Any) -> bool:
    return isinstance(value, dist.ProcessGroup | ProcessGroupName) or (
        hasattr(value, "rank") and hasattr(value, "size")
    )
