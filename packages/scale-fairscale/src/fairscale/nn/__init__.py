"""Wrappers of modules by FairScale's names. Begin with `data_parallel/fully_sharded_data_parallel.py`."""

from fairscale.nn.checkpoint import checkpoint_wrapper
from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
from fairscale.nn.misc import FlattenParamsWrapper
from fairscale.nn.moe import MOELayer, Top2Gate
from fairscale.nn.pipe import Pipe, PipeRPCWrapper
from fairscale.nn.wrap import auto_wrap, config_auto_wrap_policy, default_auto_wrap_policy, enable_wrap, wrap

__all__ = [
    "FlattenParamsWrapper",
    "FullyShardedDataParallel",
    "MOELayer",
    "Pipe",
    "PipeRPCWrapper",
    "ShardedDataParallel",
    "Top2Gate",
    "auto_wrap",
    "checkpoint_wrapper",
    "config_auto_wrap_policy",
    "default_auto_wrap_policy",
    "enable_wrap",
    "wrap",
]
