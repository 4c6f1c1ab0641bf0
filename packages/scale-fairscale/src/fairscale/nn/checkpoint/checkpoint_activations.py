"""`checkpoint_wrapper` and the switches around it: scale-checkpoint's, under FairScale's names."""

from typing import Any, TypeVar

from torch import nn

import scale_checkpoint
from scale_checkpoint import disable_checkpointing, is_checkpointing, is_recomputing
from scale_checkpoint.state import checkpointing as enable_checkpointing
from scale_checkpoint.state import recomputing as enable_recomputing

M = TypeVar("M", bound=nn.Module)


def checkpoint_wrapper(module: M, offload_to_cpu: Any = False, **kwargs: Any) -> M:
    """Makes a module keep only its inputs, and compute everything else again in the backward pass.

    Args:
        module: Changed in place, and returned.
        offload_to_cpu: Whether the inputs are kept on the host; of another type than bool, as the `{}` of older
            programs, whether it is true.
        **kwargs: As for `scale_checkpoint.checkpoint_wrapper`.
    """
    return scale_checkpoint.checkpoint_wrapper(module, bool(offload_to_cpu), **kwargs)


__all__ = [
    "checkpoint_wrapper",
    "disable_checkpointing",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
]
