"""Strategies for Lightning's Trainer and for Fabric, by instance or by the names that importing this registers.

Begin with `trainer`; `fabric` has the same three for Fabric. Below them: `optimizers` makes an `OSS` of a plain
optimizer and full states of sharded ones, `checkpoints` saves and loads folders of which each rank writes its shard,
and `options` has the constructors.
"""

from lightning.fabric.strategies import STRATEGY_REGISTRY as _FABRIC_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry as _TrainerRegistry

from scale_lightning.fabric import FabricScaleFSDPStrategy, FabricScaleOSSStrategy, FabricScaleShardedDDPStrategy
from scale_lightning.trainer import ScaleFSDPStrategy, ScaleOSSStrategy, ScaleShardedDDPStrategy

__version__ = "2026.11.0"
__all__ = [
    "FabricScaleFSDPStrategy",
    "FabricScaleOSSStrategy",
    "FabricScaleShardedDDPStrategy",
    "ScaleFSDPStrategy",
    "ScaleOSSStrategy",
    "ScaleShardedDDPStrategy",
]

for _registry, _prefix in ((_TrainerRegistry, ""), (_FABRIC_REGISTRY, "Fabric")):
    for _name, _strategy, _description in (
        ("scale_fsdp", "ScaleFSDPStrategy", "Parameters, gradients and optimizer state sharded (scale-fsdp)"),
        ("scale_oss", "ScaleOSSStrategy", "Optimizer state sharded, under DistributedDataParallel (scale-oss)"),
        ("scale_sharded_ddp", "ScaleShardedDDPStrategy", "Gradients and optimizer state sharded (scale-oss)"),
    ):
        _registry.register(_name, globals()[_prefix + _strategy], description=_description, override=True)
del _registry, _prefix, _name, _strategy, _description

for _name in __all__:  # Tracebacks and documentation show the path by which people import.
    globals()[_name].__module__ = __name__
del _name
