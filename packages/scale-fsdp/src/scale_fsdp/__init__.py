"""Fully sharded data parallel (ZeRO-3): every rank keeps one shard of parameters, gradients and optimizer state.

One step reads from top to bottom, each file knowing only those below it: `step` (what torch and autograd call, in the
order of time), `backward` (the backward pass, and how a pass ends), `root` (the order among units), `unit` (one unit
and its buffers), then `scale_core.flat.buffer` and `scale_core.comm.collectives`. `shard_module` makes units; what
stands around them is in `wrapping` (which modules), `state_dict` (what is saved and loaded), `reshard` (what changes
its place) and `offload` (optimizer state on the host).
"""

from scale_core.consistency.contract import StepError
from scale_fsdp.api import MixedPrecision
from scale_fsdp.config import FSDPConfig
from scale_fsdp.description import Description, describe
from scale_fsdp.ema import ShardedEMA
from scale_fsdp.forward_methods import register_forward_method
from scale_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from scale_fsdp.offload.optimizer import OffloadOptimizer
from scale_fsdp.reshard.reshard import reshard_to
from scale_fsdp.shard_module import fully_shard
from scale_fsdp.state_dict.full import full_state_dict
from scale_fsdp.state_dict.local import consolidate_shard_weights
from scale_fsdp.state_dict.optimizer import full_optim_state_dict, shard_optim_state_dict
from scale_fsdp.wrapping.auto_wrap import (
    auto_wrap,
    auto_wrap_bn,
    enable_wrap,
    fully_shard_modules,
    get_fsdp_instances,
    plan_units,
    wrap,
)
from scale_fsdp.wrapping.policy import (
    class_policy,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    name_policy,
    no_split_policy,
    size_policy,
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
