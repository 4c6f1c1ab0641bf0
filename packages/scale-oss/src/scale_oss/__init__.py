"""Optimizer state sharding and ShardedDataParallel (ZeRO-1 and ZeRO-2) for PyTorch.

The files in reading order; each stands only on those above it:

- `kinds`: which optimizers may be cut;
- `partition`: who updates what; numbers only;
- `alike`: what one rank refuses, all refuse;
- `places`: where the state of each parameter is kept;
- `bucket`: parameters that are whole everywhere and updated in parts;
- `in_place`: shards that are stepped on where they are;
- `whole`: shards that are put together for the step;
- `sorting`: which parameter is updated in which of these ways;
- `gathering`: the state of all ranks, on the host of one;
- `state`: the state in the plain optimizer's form;
- `state_by_param`: the state of this rank, by the user's parameters;
- `with_state`: what an `OSS` saves and loads;
- `handover`: gradients to the pieces before a step, updated pieces to all ranks after it;
- `stepping`: the step on this rank's parts;
- `clipping`: one norm of all gradients;
- `optimizer`: `OSS`;
- `split_by`: two optimizers for one model, as one;
- `forwards`: forward passes that wait for their backward;
- `notes`: what ranks tell each other at the end of a pass;
- `one_pass`: the reductions of one backward pass, in one order;
- `accumulation`: gradients that add up over passes, and outlive one that fails;
- `giving_up`: a pass that one rank does not bring to its end;
- `reducing`: backward passes, from before the forward to the comparison of all ranks;
- `waiting`: updated parameters are waited for where they are first used;
- `checks`: what a `ShardedDataParallel` refuses;
- `data_parallel`: `ShardedDataParallel`.
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
