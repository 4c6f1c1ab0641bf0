"""Fully sharded data parallel (ZeRO-3): every rank keeps one shard of parameters, gradients and optimizer state.

The path of one step reads from top to bottom in four files: `unit` (the step), `root` (the order among units),
`scale_core.flat` (the buffers and their states) and `scale_core.collectives` (the messages).
"""

from scale_fsdp.policy import (
    class_policy,
    config_auto_wrap_policy,
    default_auto_wrap_policy,
    name_policy,
    size_policy,
)
from scale_fsdp.precision import MixedPrecision
from scale_fsdp.sharding import fully_shard
from scale_fsdp.wrapper import FullyShardedDataParallel
from scale_fsdp.wrapping import auto_wrap, enable_wrap, fully_shard_modules, plan_units, wrap

__version__ = "2026.11.0"
__all__ = [
    "FullyShardedDataParallel",
    "MixedPrecision",
    "auto_wrap",
    "class_policy",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "fully_shard_modules",
    "name_policy",
    "plan_units",
    "size_policy",
    "wrap",
]

for _name in __all__:  # Tracebacks and documentation show the path by which people import.
    globals()[_name].__module__ = __name__
del _name
