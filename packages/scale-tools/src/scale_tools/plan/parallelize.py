"""A planned model for a strategy: built, checkpointed, with the groups of its ranks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from scale_checkpoint import apply_checkpointing
from scale_checkpoint.wrapper import How
from scale_core.comm.group import group_of
from scale_core.comm.mesh import ParallelDims
from scale_fsdp.wrapping.auto_wrap import plan_units
from scale_tools.plan.model import Built, PlannedModel
from scale_tools.plan.strategies import Strategy
from scale_train.options import ParallelOptions
from scale_train.training.parallel.parallelize_gpt import parallel_dims


def build(planned: PlannedModel, dims: ParallelDims) -> Built:
    """Makes a model; experts are divided as the axes of `dims` say."""
    return planned.build() if planned.build_over is None else planned.build_over(dims)


def dims_of(asked: ParallelOptions) -> ParallelDims:
    """The axes of a rank; called aside of a simulation, which makes no groups itself."""
    dims = parallel_dims(asked, group_of().size)
    group_of(dims)  # Makes the groups.
    return dims


def checkpoint_blocks(planned: PlannedModel, strategy: Strategy, model: nn.Module) -> None:
    """Sets what each block does with its activations, as `scale-train lm` does."""
    kept: How = "offload" if strategy.offload else "keep"
    how: dict[str, How] = {"none": kept, "all": "recompute", "selective": "selective"}
    for name in plan_units(model, planned.blocks(model)):
        if name:
            apply_checkpointing(model.get_submodule(name), how[strategy.checkpoint], offload_inputs=strategy.offload)


def autocast(dtype: torch.dtype | None, device_type: str = "cpu") -> AbstractContextManager[Any]:
    """A context that computes in `dtype`; None changes nothing."""
    return nullcontext() if dtype is None else torch.autocast(device_type, dtype)
