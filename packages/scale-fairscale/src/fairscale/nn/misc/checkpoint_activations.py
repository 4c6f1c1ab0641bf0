"""The older path of `fairscale.nn.checkpoint.checkpoint_activations`."""

from fairscale.nn.checkpoint.checkpoint_activations import (
    checkpoint_wrapper,
    disable_checkpointing,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
)

__all__ = [
    "checkpoint_wrapper",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
]
