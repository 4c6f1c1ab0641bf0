"""One model and its optimizer, six ways to spread them over ranks, behind the few verbs that the training loop needs.

The loop reads the same for all: call the model, go backward, clip, step. What differs between fully sharded, sharded in
part, replicated, in stages and plain stands here and nowhere else.
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
from scale_train.parallelize.pipeline import Pipeline
from scale_train.parallelize.tensor import Axes, divide_blocks, two_axes
from scale_train.reporting.reporters import Told


@dataclass(frozen=True)
class Engine:
    """A model and its optimizer that are spread over the ranks of a group.

    Attributes:
        model: What is called: the model itself, or the module around it that spreads it.
        plain: The model itself, whose `named_parameters` have the plain names; local shards with fsdp, and with pipe
            the stages of this rank.
        optimizer: Of the whole model, or of this rank's part of it.
        options: How they are spread.
        device: Where the model computes.
        axes: The ranks that see other parts of the batch, and those that divide this one's layers.
    """

    model: nn.Module
    plain: GPT | Pipeline
    optimizer: Optimizer
    options: ParallelOptions
    device: torch.device
    axes: Axes

    @property
    def pipeline(self) -> Pipeline | None:
        """The model, if it is in stages: then all ranks see the same batch."""
        return self.plain if isinstance(self.plain, Pipeline) else None

    def computing(self) -> AbstractContextManager[object]:
        """Around each forward pass: the precision, where the model does not see to it itself."""
        if self.options.precision == "bf16" and self.options.parallel != "fsdp":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def syncing(self, *, last: bool) -> AbstractContextManager[object]:
        """Around each micro-batch: gradients are reduced at the last one only, where waiting costs no memory."""
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
            norm: Tensor = self.plain.clip_grad_norm_(max_norm)  # type: ignore[operator]
            return norm
        if self.pipeline is not None:
            return self.pipeline.clip(max_norm)
        if self.axes.tensor.size > 1:
            return clip_grad_norm(self.plain.parameters(), max_norm)
        return nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)

    def params(self) -> list[nn.Parameter]:
        """The parameters as they are after the last step; local shards with fsdp."""
        if isinstance(self.optimizer, OSS):
            self.optimizer.wait()  # What other ranks have updated may still be on its way.
        return list(self.plain.parameters())

    def with_gradients(self) -> list[nn.Parameter]:
        """What has the averaged gradients when the optimizer steps."""
        return self.optimizer.params_with_gradients if isinstance(self.optimizer, OSS) else self.params()


def spread(
    model: GPT,
    options: ParallelOptions,
    optimizer_options: OptimizerOptions,
    group: Group,
    device: torch.device,
    progress: Told | None = None,
) -> Engine:
    """Puts a model on the device, spreads it as asked and makes its optimizer; the model must be equal on all ranks.

    With pipe the device gets this rank's stages alone.

    With fsdp the model may be on the meta device: its units are then given values one by one, and `progress` is told.
    One whose layers are to be divided is whole.
    """
    checkpoint_blocks(model, options.checkpoint_activations, offload=options.offload_activations)
    if options.parallel == "pipe":
        pipeline = Pipeline(model, options, group, device)
        optimizer = _make_optimizer(pipeline, options, optimizer_options, group)
        return Engine(pipeline, pipeline, optimizer, options, device, Axes(group, Group()))
    axes = two_axes(group, options.tensor_parallel)
    pieces = options.overlap_pieces
    divide_blocks(model, axes, sequence_parallel=options.sequence_parallel, overlap_pieces=pieces)
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
    model: GPT, options: ParallelOptions, group: Group, device: torch.device, progress: Told | None = None
) -> None:
    """Each block is a unit of its own, and the rest (embedding, last norm, head) is the outer unit."""
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
        init=model.initialise,
        compute_device=device,
    )


def _make_optimizer(
    model: nn.Module, parallel: ParallelOptions, options: OptimizerOptions, group: Group
) -> AdamW | OSS:
    """AdamW, with weight decay on matrices only."""
    params = list(model.parameters())
    # The whole parameter's shape: a local shard may have fewer dimensions, and must not change its group for it.
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
