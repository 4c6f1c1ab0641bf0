"""Process groups of model, context, pipeline and data parallelism, from `scale_tp`.

A process by itself needs no initialization: there every layer is whole, where FairScale raised.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist

import scale_tp
from fairscale._warnings import warn_argument, warn_once
from fairscale.internal.process_group import unwrap_process_group
from scale_tp import destroy_model_parallel
from scale_tp.megatron import (
    get_context_parallel_group,
    get_context_parallel_rank,
    get_context_parallel_ranks,
    get_context_parallel_world_size,
    get_data_parallel_group,
    get_data_parallel_rank,
    get_data_parallel_ranks,
    get_data_parallel_world_size,
    model_parallel_is_initialized,
)
from scale_tp.megatron import get_pipeline_model_parallel_group as get_pipeline_parallel_group
from scale_tp.megatron import get_pipeline_model_parallel_ranks as get_pipeline_parallel_ranks
from scale_tp.megatron import get_tensor_model_parallel_group as get_model_parallel_group
from scale_tp.megatron import get_tensor_model_parallel_rank as get_model_parallel_rank
from scale_tp.megatron import get_tensor_model_parallel_src_rank as get_model_parallel_src_rank
from scale_tp.megatron import get_tensor_model_parallel_world_size as get_model_parallel_world_size

__all__ = [
    "destroy_model_parallel",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_src_rank",
    "get_model_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_ranks",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
]


def initialize_model_parallel(
    model_parallel_size_: int,
    pipeline_length: int = 1,
    context_parallel_size: int = 1,
    *,
    model_parallel_backend: str | None = None,
    pipeline_backend: str | None = None,
    cp_backend: str | None = None,
    ddp_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Divides all ranks into groups, as `scale_tp.initialize_model_parallel` does. All ranks call it, once.

    As in FairScale, a model parallel size above the number of ranks is that number; there is a warning.

    Args:
        model_parallel_size_: Between how many ranks each layer is divided.
        pipeline_length: Between how many stages the layers are.
        context_parallel_size: Between how many ranks each sequence is.
        model_parallel_backend: Transport of the groups that divide layers.
        pipeline_backend: Transport between stages.
        cp_backend: Transport of the groups that divide sequences.
        ddp_backend: Transport between replicas.
        timeout: How long an operation of these groups may take.

    Raises:
        ValueError: The sizes don't divide the number of ranks.
        RuntimeError: It was called before.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if model_parallel_size_ > world:
        warn_once(
            f"initialize_model_parallel({model_parallel_size_})",
            f"there are {world} ranks, so each layer is divided between {world}: "
            f"scale_tp.initialize_model_parallel({world})",
        )
        model_parallel_size_ = world
    if timeout is not None:
        warn_argument(
            "initialize_model_parallel",
            "timeout",
            "is written limit_seconds: scale_tp.initialize_model_parallel("
            f"{model_parallel_size_}, limit_seconds={timeout.total_seconds():g})",
        )
    scale_tp.initialize_model_parallel(
        model_parallel_size_,
        pipeline_length,
        context_parallel_size,
        model_parallel_backend=model_parallel_backend,
        pipeline_backend=pipeline_backend,
        cp_backend=cp_backend,
        ddp_backend=ddp_backend,
        limit_seconds=None if timeout is None else timeout.total_seconds(),
    )


_AXES = {
    "_MODEL_PARALLEL_GROUP": "model",
    "_DATA_PARALLEL_GROUP": "data",
    "_PIPELINE_PARALLEL_GROUP": "pipeline",
    "_CONTEXT_PARALLEL_GROUP": "context",
}


class _Module(ModuleType):
    """This module: programs assign groups to its variables in place of a call of `initialize_model_parallel`."""

    def __getattr__(self, name: str) -> Any:
        if name not in _AXES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        axis = scale_tp.parallel_state.axis_group(_AXES[name]) if model_parallel_is_initialized() else None
        return None if axis is None else axis.process_group

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _AXES:
            scale_tp.parallel_state.set_axis_group(_AXES[name], unwrap_process_group(value))
        else:
            super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if name in _AXES:
            scale_tp.parallel_state.set_axis_group(_AXES[name], None)
        else:
            super().__delattr__(name)


sys.modules[__name__].__class__ = _Module
