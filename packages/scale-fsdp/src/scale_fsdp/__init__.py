"""Fully sharded data parallel (ZeRO-3): every rank keeps one shard of parameters, gradients and optimizer state.

Here stands what users call: `shard_module` (`fully_shard`) and its `options`, `fsdp_module` (the methods that it adds
to a module), the wrapper `fully_sharded_data_parallel`. `wrapping` chooses modules, `state_dict` saves and loads,
`reshard` changes ranks, dtypes and devices, `offload` keeps optimizer state on the host. A training step is in
`runtime`: begin with its `step`.
"""

import logging
import typing

from scale_core.lazy_names import lazy_names as _lazy_names
from scale_fsdp.communication import CommunicationPolicy
from scale_fsdp.forward_methods import register_fsdp_forward_method
from scale_fsdp.fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from scale_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from scale_fsdp.options import ShardOptions
from scale_fsdp.shard_module import fully_shard
from scale_fsdp.state_dict.full import full_state_dict
from scale_fsdp.state_dict.optimizer import full_optim_state_dict, shard_optim_state_dict
from scale_fsdp.wrapping.auto_wrap import fully_shard_modules
from scale_fsdp.wrapping.policy import (
    class_policy,
    name_policy,
    no_split_policy,
    size_policy,
)

if typing.TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from scale_fsdp.description import describe
    from scale_fsdp.ema import ShardedEMA
    from scale_fsdp.offload.optimizer import OffloadOptimizer
    from scale_fsdp.reshard.reshard import reshard_to

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "CPUOffloadPolicy",
    "CommunicationPolicy",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "OffloadOptimizer",
    "OffloadPolicy",
    "ShardOptions",
    "ShardedEMA",
    "UnshardHandle",
    "class_policy",
    "describe",
    "full_optim_state_dict",
    "full_state_dict",
    "fully_shard",
    "fully_shard_modules",
    "name_policy",
    "no_split_policy",
    "register_fsdp_forward_method",
    "reshard_to",
    "shard_optim_state_dict",
    "share_comm_ctx",
    "size_policy",
]

# No training step of a plain `fully_shard` needs these, so they are imported when asked for. The policies are torch's.
_LAZY = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadOptimizer": "scale_fsdp.offload.optimizer",
    "OffloadPolicy": "torch.distributed.fsdp",
    "ShardedEMA": "scale_fsdp.ema",
    "describe": "scale_fsdp.description",
    "reshard_to": "scale_fsdp.reshard.reshard",
}

__getattr__, __dir__ = _lazy_names(__name__, _LAZY)
