"""The names of `fairscale.nn.pipe.checkpoint` by torchgpipe's path."""

from fairscale.nn.pipe.checkpoint import (
    checkpoint,
    enable_checkpointing,
    enable_recomputing,
    is_checkpointing,
    is_recomputing,
)

__all__ = ["checkpoint", "enable_checkpointing", "enable_recomputing", "is_checkpointing", "is_recomputing"]
