"""Activation checkpointing and offload for PyTorch.

`wrapper` has `checkpoint_wrapper` and `apply_checkpointing`. `recompute/` is one call, computed again in the backward:
begin with `recompute`. `offload/` moves saved tensors to the host or to a file. `planner/` chooses for each block by
measurement, and `memory_tracker` shows memory by module.
"""

import logging

from scale_checkpoint.memory_tracker import LayerMemoryTracker, suggest_checkpoint_location
from scale_checkpoint.offload.offload import offload_activations
from scale_checkpoint.planner.plan import BudgetError, apply_plan, plan_memory
from scale_checkpoint.recompute.determinism_check import RecomputationError, check_recomputation
from scale_checkpoint.state import disable_checkpointing, is_checkpointing, is_recomputing
from scale_checkpoint.wrapper import apply_checkpointing, checkpoint_modules, checkpoint_wrapper

logging.getLogger(__name__).addHandler(logging.NullHandler())

__version__ = "2026.11.0"
__all__ = [
    "BudgetError",
    "LayerMemoryTracker",
    "RecomputationError",
    "apply_checkpointing",
    "apply_plan",
    "check_recomputation",
    "checkpoint_modules",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "is_checkpointing",
    "is_recomputing",
    "offload_activations",
    "plan_memory",
    "suggest_checkpoint_location",
]

for _name in __all__:  # Tracebacks and documentation show the path by which people import.
    globals()[_name].__module__ = __name__
del _name
