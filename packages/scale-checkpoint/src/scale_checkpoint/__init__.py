"""Activation checkpointing and offload for PyTorch.

`wrapper` has `checkpoint_wrapper` and `apply_checkpointing`. `recompute/` is one call, computed again in the backward:
begin with `recompute`. `offload/` moves saved tensors to the host or to a file. `planner/` chooses for each block by
measurement, and `memory_tracker` shows memory by module.
"""

import logging

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

logging.getLogger(__name__).addHandler(logging.NullHandler())

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
