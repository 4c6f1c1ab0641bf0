"""Data parallelism with sharding. Begin with `fully_sharded_data_parallel.py`."""

from fairscale.nn.data_parallel.fully_sharded_data_parallel import (
    FullyShardedDataParallel,
    TrainingState,
    auto_wrap_bn,
    get_fsdp_instances,
    no_pre_load_state_dict_hook,
)
from fairscale.nn.data_parallel.sharded_ddp import ShardedDataParallel

__all__ = [
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "TrainingState",
    "auto_wrap_bn",
    "get_fsdp_instances",
    "no_pre_load_state_dict_hook",
]
