"""Activation checkpointing, scale-checkpoint's. Begin with `checkpoint_activations.py`."""

from fairscale.nn.checkpoint.checkpoint_activations import checkpoint_wrapper, is_checkpointing, is_recomputing

__all__ = ["checkpoint_wrapper", "is_checkpointing", "is_recomputing"]
