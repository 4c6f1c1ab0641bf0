"""`checkpoint_wrapper` and the switches around it: scale-checkpoint's, under FairScale's names."""

from scale_checkpoint import checkpoint_wrapper, disable_checkpointing, is_checkpointing, is_recomputing
from scale_checkpoint.state import checkpointing as enable_checkpointing
from scale_checkpoint.state import recomputing as enable_recomputing

__all__ = [
    "checkpoint_wrapper",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
]
