"""Fully sharded data parallel (ZeRO-3): every rank keeps one shard of parameters, gradients and optimizer state.

The path of one step reads from top to bottom in four files: `unit` (the step), `root` (the order among units),
`scale_core.flat` (the buffers and their states) and `scale_core.collectives` (the messages). `sharding` makes units;
what stands around them is in `wrapping` (which modules), `state` (what is saved and loaded), `moving` (what changes its
place) and `offload` (optimizer state on the host).
"""

from scale_core.contract import StepError
from scale_fsdp.config import FSDPConfig
from scale_fsdp.describe import Description, describe
from scale_fsdp.ema import ShardedEMA
from scale_fsdp.forward_methods import register_forward_method
from scale_fsdp.moving.live import reshard_to
from scale_fsdp.offload.optimizer import OffloadOptimizer
from scale_fsdp.precision import MixedPrecision
from scale_fsdp.sharding import fully_shard
from scale_fsdp.state.consolidate import consolidate_shard_weights
from scale_fsdp.state.full import full_state_dict
from scale_fsdp.state.optimizer import full_optim_state_dict, shard_optim_state_dict
from scale_fsdp.wrapper import FullyShardedDataParallel
from scale_fsdp.wrapping.batch_norm import auto_wrap_bn
from scale_fsdp.wrapping.policy import (
    class_policy,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    name_policy,
    no_split_policy,
    size_policy,
)
from scale_fsdp.wrapping.units import (
    auto_wrap,
    enable_wrap,
    fully_shard_modules,
    get_fsdp_instances,
    plan_units,
    wrap,
)

__version__ = "2026.11.0"
__all__ = [
    "Description",
    "FSDPConfig",
    "FullyShardedDataParallel",
    "MixedPrecision",
    "OffloadOptimizer",
    "ShardedEMA",
    "StepError",
    "auto_wrap",
    "auto_wrap_bn",
    "class_policy",
    "config_auto_wrap_policy",
    "consolidate_shard_weights",
    "default_auto_wrap_policy",
    "describe",
    "enable_wrap",
    "full_optim_state_dict",
    "full_state_dict",
    "fully_shard",
    "fully_shard_modules",
    "get_fsdp_instances",
    "name_policy",
    "no_split_policy",
    "plan_units",
    "register_forward_method",
    "reshard_to",
    "shard_optim_state_dict",
    "size_policy",
    "wrap",
]

for _name in __all__:  # Tracebacks and documentation show the path by which people import.
    if globals()[_name].__module__.startswith(__name__):  # `StepError` is scale-core's.
        globals()[_name].__module__ = __name__
del _name
