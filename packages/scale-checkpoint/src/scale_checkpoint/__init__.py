"""Activation checkpointing and offload for PyTorch.

The files in reading order; each stands only on those above it:

- `phase`: which pass a checkpointed module is in;
- `nested`: tensors taken out of what a module is given, and put back;
- `randomness`: random numbers that are drawn again;
- `buffers`: what a forward changes, and a recomputation must not;
- `buffer_replay`: these in a recomputation;
- `weights`: what a forward computes with, and a recomputation, too;
- `modes`: `train()` and `eval()`, as in the forward;
- `batch_norm`: the same for those who recompute in another way;
- `live`: the bytes of all storages that live;
- `versions`: that what was saved is as it was;
- `lanes`: copies that run beside the computation;
- `places`: where offloaded bytes are kept;
- `store`: what has left, in the order in which it left, and is fetched ahead;
- `offload`: which saved tensors leave;
- `operators`: whose results are kept;
- `selective`: results kept in the forward, and given back;
- `recheck`: a recomputation that differs;
- `treatment`: what is done with a module's activations;
- `recomputation`: one call of a module, computed again;
- `forward`: what is called in the place of a module's forward;
- `wrapper`: `checkpoint_wrapper` and `apply_checkpointing`;
- `selection`: many modules at once, by their names;
- `timeline`: what memory a step takes under a plan, in numbers alone;
- `solver`: the fastest plan within a budget;
- `ways`: what may be done with a block, by name;
- `blocks`: the modules for which a plan decides;
- `shape`: what a plan knows a model by;
- `tracing`: where a step's memory stands at each block;
- `step`, `trial`, `assembling`, `profile`: what the blocks of a model cost;
- `chart`, `plot`: plans as text and as pictures;
- `plan`: `plan_memory` and `apply_plan`;
- `measure`: what a step takes, beside what a plan predicts;
- `tracker`: memory by module;
- `suggest`: where to checkpoint, by that.
"""

from scale_checkpoint.memory_tracker import (
    LayerMemoryTracker,
    LayerTrace,
    SuggestedCheckpoints,
    suggest_checkpoint_location,
)
from scale_checkpoint.offload.offload import offload_activations
from scale_checkpoint.planner.plan import BudgetError, MemoryPlan, apply_plan, best_plan, memory_front, plan_memory
from scale_checkpoint.planner.profile import MemoryProfile, profile_memory
from scale_checkpoint.planner.step import MeasuredStep, measure_step
from scale_checkpoint.recompute.batch_norm import patch_batchnorm
from scale_checkpoint.recompute.determinism_check import RecomputationError, check_recomputation
from scale_checkpoint.state import disable_checkpointing, is_checkpointing, is_recomputing
from scale_checkpoint.wrapper import apply_checkpointing, checkpoint_modules, checkpoint_wrapper, is_checkpointed

__version__ = "2026.11.0"
__all__ = [
    "BudgetError",
    "LayerMemoryTracker",
    "LayerTrace",
    "MeasuredStep",
    "MemoryPlan",
    "MemoryProfile",
    "RecomputationError",
    "SuggestedCheckpoints",
    "apply_checkpointing",
    "apply_plan",
    "best_plan",
    "check_recomputation",
    "checkpoint_modules",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "is_checkpointed",
    "is_checkpointing",
    "is_recomputing",
    "measure_step",
    "memory_front",
    "offload_activations",
    "patch_batchnorm",
    "plan_memory",
    "profile_memory",
    "suggest_checkpoint_location",
]

for _name in __all__:  # Tracebacks and documentation show the path by which people import.
    globals()[_name].__module__ = __name__
del _name
