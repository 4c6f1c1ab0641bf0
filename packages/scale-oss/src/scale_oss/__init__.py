"""Optimizer state sharding and ShardedDataParallel (ZeRO-1 and ZeRO-2) for PyTorch.

Begin with `oss.py`, the optimizer and its step, and `bucket.py`, what a step works on; then `sharded_ddp.py` and
`reducer.py`, forward and backward.
"""

from scale_core.consistency.contract import StepError
from scale_oss.chained_optimizer import SplitOptimizer, split_by
from scale_oss.oss import OSS
from scale_oss.sharded_ddp import ShardedDataParallel

__version__ = "2026.11.0"
__all__ = ["OSS", "ShardedDataParallel", "SplitOptimizer", "StepError", "split_by"]

for _name in __all__:  # Tracebacks and documentation show the path by which people import.
    if globals()[_name].__module__.startswith(__name__):  # `StepError` is scale-core's.
        globals()[_name].__module__ = __name__
del _name
