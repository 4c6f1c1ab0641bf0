"""Fully sharded data parallel (ZeRO-3): every rank keeps one shard of parameters, gradients and optimizer state."""

from scale_fsdp.fully_shard import fully_shard
from scale_fsdp.precision import MixedPrecision
from scale_fsdp.wrapper import FullyShardedDataParallel

__version__ = "2026.11.0"
__all__ = ["FullyShardedDataParallel", "MixedPrecision", "fully_shard"]
