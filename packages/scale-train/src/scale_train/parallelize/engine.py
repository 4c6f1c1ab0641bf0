"""Engine: a model and its optimizer under each `--parallel`, with the same methods for the trainer.

The trainer reads the same for all: call the model, go backward, clip, step. What differs is here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from scale_core import clip_grad_norm
from scale_core.comm.group import Group
from scale_core.shard import full_shape
from scale_fsdp import MixedPrecision, class_policy, fully_shard_modules
from scale_oss import OSS, ShardedDataParallel
from scale_train.config.options import OptimizerOptions, ParallelOptions
from scale_train.model import GPT, Block
from scale_train.parallelize.activations import checkpoint_blocks
from scale_train.parallelize.pipeline import PipelineEngine
from scale_train.parallelize.tensor import MeshAxes, mesh_axes, parallelize_blocks
from scale_train.reporting.reporters import ProgressCallback


@dataclass(frozen=True)
class Engine:
    """A model and its optimizer on the ranks of a group."""

    model: nn.Module  # what is called: `raw_model`, or DDP or ShardedDataParallel around it
    raw_model: GPT | PipelineEngine  # with the plain names; local shards with fsdp, this rank's stages with pipe
    optimizer: Optimizer
    options: ParallelOptions
    device: torch.device
    axes: MeshAxes

    @property
    def pipeline(self) -> PipelineEngine | None:
        """The model, if it is a pipeline: then all ranks see the same batch."""
        return self.raw_model if isinstance(self.raw_model, PipelineEngine) else None

    def autocast(self) -> AbstractContextManager[object]:
        """Around each forward: the precision, where the model does not cast itself."""
        if self.options.precision == "bf16" and self.options.parallel != "fsdp":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """Around each micro-batch: reduces gradients at the last one only, where that costs no memory."""
        if last:
            return nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        if self.options.parallel in ("fsdp", "sharded-ddp") and self.options.no_sync:
            context: AbstractContextManager[object] = self.model.no_sync()  # type: ignore[operator]
            return context
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradients to a norm of at most `max_norm`; returns the norm before, a scalar."""
        if isinstance(self.optimizer, OSS):
            return self.optimizer.clip_grad_norm(max_norm)
        if self.options.parallel == "fsdp":
            norm: Tensor = self.raw_model.clip_grad_norm_(max_norm)  # type: ignore[operator]
            return norm
        if self.pipeline is not None:
            return self.pipeline.clip(max_norm)
        if self.axes.tensor.size > 1:
            return clip_grad_norm(self.raw_model.parameters(), max_norm)
        return nn.utils.clip_grad_norm_(self.raw_model.parameters(), max_norm)

    def params(self) -> list[nn.Parameter]:
        """The parameters as they are after the last step; local shards with fsdp."""
        if isinstance(self.optimizer, OSS):
            self.optimizer.wait()  # Gathers of what other ranks have updated may still run.
        return list(self.raw_model.parameters())

    def params_with_gradients(self) -> list[nn.Parameter]:
        """The parameters that have gradients when the optimizer steps."""
        return self.optimizer.params_with_gradients if isinstance(self.optimizer, OSS) else self.params()


def parallelize_gpt(
    model: GPT,
    options: ParallelOptions,
    optimizer_options: OptimizerOptions,
    group: Group,
    device: torch.device,
    progress: ProgressCallback | None = None,
) -> Engine:
    """Moves a model, equal on all ranks, to the device, parallelizes it and makes its optimizer.

    With pipe or fsdp it may be on the meta device, but not with tensor parallelism; with fsdp `progress` is called
    after each unit was initialized.
    """
    checkpoint_blocks(model, options.checkpoint_activations, offload=options.offload_activations)
    if options.parallel == "pipe":
        pipeline = PipelineEngine(model, options, group, device)
        optimizer = _make_optimizer(pipeline, options, optimizer_options, group)
        return Engine(pipeline, pipeline, optimizer, options, device, MeshAxes(group, Group()))
    axes = mesh_axes(group, options.tensor_parallel)
    pieces = options.overlap_pieces
    parallelize_blocks(model, axes, sequence_parallel=options.sequence_parallel, overlap_pieces=pieces)
    group = axes.data
    if options.parallel == "fsdp":
        _shard(model, options, group, device, progress)
    else:
        model.to(device)
    optimizer = _make_optimizer(model, options, optimizer_options, group)
    called: nn.Module = model
    if isinstance(optimizer, OSS) and options.parallel == "sharded-ddp":
        called = ShardedDataParallel(model, optimizer)
    elif options.parallel in ("ddp", "oss") and group.process_group is not None:
        called = DistributedDataParallel(model, process_group=group.process_group, gradient_as_bucket_view=True)
    return Engine(called, model, optimizer, options, device, axes)


def _shard(
    model: GPT, options: ParallelOptions, group: Group, device: torch.device, progress: ProgressCallback | None = None
) -> None:
    """Each block is a unit, and the rest (embedding, last norm, head) is the root unit."""
    if not model.embedding.weight.is_meta:
        model.to(device)
    fully_shard_modules(
        model,
        class_policy(Block),
        progress=progress,
        process_group=group.process_group,
        reshard_after_forward=options.reshard_after_forward,
        mixed_precision=options.precision == "bf16"
        and MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        init=model.init_weights,
        compute_device=device,
    )


def _make_optimizer(
    model: nn.Module, parallel: ParallelOptions, options: OptimizerOptions, group: Group
) -> AdamW | OSS:
    """AdamW, with weight decay on matrices only."""
    params = list(model.parameters())
    # The full shape: a local shard may have fewer dimensions.
    matrices = [param for param in params if len(full_shape(param)) >= 2]
    vectors = [param for param in params if len(full_shape(param)) < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    arguments: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95), "fused": options.fused}
    if parallel.parallel in ("oss", "sharded-ddp"):
        return OSS(groups, AdamW, group, **arguments)
    return AdamW(groups, **arguments)
