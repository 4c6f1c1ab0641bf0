"""Optimizer state sharding and ShardedDataParallel (ZeRO-1 and ZeRO-2) for PyTorch.

`oss` is the optimizer, `step` its step, `sharded_ddp` the model around it, `options` what they take; read these first.
Below them:

- `buckets`: which rank updates which parameters, in flat memory;
- `reducer`, `grad_accumulation`: gradients reduced in the backward pass, aborted, or accumulated;
- `state_dict`: state by the plain optimizer's keys;
- `chained_optimizer`: two optimizers for one model, as one;
- `local_sgd`: ranks that train on their own between outer steps.

The names of DistributedDataParallel's reducer, and ours:

    prepare_for_backward     `Reducer.prepare`
    autograd_hook            `Reducer._post_accumulate_grad`
    mark_bucket_ready        `ReductionSchedule.mark_ready`
    all_reduce_bucket        `ReductionSchedule._reduce_next`, `Bucket.reduce`: a reduce-scatter
    finalize_bucket_dense    `Bucket.commit`
    rebuild_buckets          `Reducer._rebuild_order`, which changes their order alone
"""

import logging

from scale_oss.chained_optimizer import SplitOptimizer, split_by
from scale_oss.local_sgd import LocalSGD
from scale_oss.options import LocalSGDOptions, OSSOptions, OuterStep
from scale_oss.oss import OSS
from scale_oss.sharded_ddp import ShardedDataParallel

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "OSS",
    "LocalSGD",
    "LocalSGDOptions",
    "OSSOptions",
    "OuterStep",
    "ShardedDataParallel",
    "SplitOptimizer",
    "split_by",
]

for _name in __all__:  # Tracebacks and documentation show the path by which people import.
    globals()[_name].__module__ = __name__
del _name
