"""The engine: a model and its optimizer under any `--parallel`, as the trainer sees them.

The trainer reads the same for all: call the model, go backward, clip, step. What differs is here, and in the files of
this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from scale_core.comm.group import Group, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.shard import full_shape
from scale_fsdp import ShardOptions
from scale_moe import MoE, average_replicated_gradients
from scale_oss import OSS, ShardedDataParallel
from scale_tp import context_parallel, position_ids, split_sequence
from scale_train.huggingface.model import TransformersSource
from scale_train.model.gpt import GPT, IGNORED
from scale_train.options import OptimizerOptions, ParallelOptions
from scale_train.training.parallel.activations import checkpoint_blocks
from scale_train.training.parallel.parallelize_gpt import (
    COMPUTE_DTYPES,
    blocks_policy,
    parallelize_blocks,
    shard_units,
    sharding_of,
)
from scale_train.training.parallel.pipeline_gpt import PipelineEngine
from scale_train.training.reports.reporters import ProgressCallback


@dataclass(frozen=True)
class Engine:
    """A model and its optimizer on the ranks of a group."""

    model: nn.Module  # what is called: `raw_model`, or DDP or ShardedDataParallel around it
    raw_model: nn.Module  # with the plain names; local shards with fsdp, this rank's stages with pipe
    optimizer: Optimizer
    options: ParallelOptions
    device: torch.device
    dims: ParallelDims

    @property
    def batch_group(self) -> Group:
        """The ranks that have different parts of the batch."""
        return group_of(self.dims, "batch")

    @property
    def dropout_rank(self) -> int:
        """Differs between ranks that draw different numbers: ranks that divide layers need the same ones."""
        return group_of(self.dims, "loss").rank * self.dims.pp + group_of(self.dims, "pp").rank

    @property
    def adds_loss(self) -> bool:
        """Whether this rank's loss enters the sum over all ranks: one rank for each part of the batch."""
        return group_of(self.dims, "pp", "tp").rank == 0

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model; 0 for a model of transformers."""
        return self.raw_model.config.layers if isinstance(self.raw_model, GPT | PipelineEngine) else 0

    def expert_layers(self) -> dict[int, MoE]:
        """The layers of experts that this rank has, by the number of their block."""
        stages = [self.raw_model] if self.pipeline is None else list(self.pipeline.pipe.stages.values())
        named = [
            named_module
            for stage in stages
            for named_module in stage.named_modules()
            if isinstance(named_module[1], MoE)
        ]
        # A stage has placeholders, without parameters, for the layers of other stages.
        local_layers = [(name, layer) for name, layer in named if next(layer.parameters(), None) is not None]
        return {int(name.removesuffix(".moe").rpartition(".")[2]): layer for name, layer in local_layers}

    @property
    def pipeline(self) -> PipelineEngine | None:
        """The model, if it is a pipeline: then the ranks of each see the same batch."""
        return self.raw_model if isinstance(self.raw_model, PipelineEngine) else None

    def loss(self, tokens: Tensor, targets: Tensor, reduction: str = "mean", positions: Tensor | None = None) -> Tensor:
        """The loss of a batch in nats, fp32, a scalar, as `GPT.forward` has it."""
        if isinstance(self.raw_model, GPT | PipelineEngine):
            position_kwargs = {} if positions is None else {"positions": positions}
            loss: Tensor = self.model(tokens, targets, reduction, **position_kwargs)
            return loss
        logits = self.model(input_ids=tokens, use_cache=False).logits.float().flatten(0, 1)
        total = functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return total / targets.numel() if reduction == "mean" else total

    def attention(self) -> AbstractContextManager[object]:
        """Around each forward and backward: attention over full sequences, where ranks divide them."""
        return context_parallel(self.dims, attention=self.options.context_attention)

    def part_of(self, tokens: Tensor, targets: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor | None]:
        """This rank's part of sequences [batch, sequence] on the device, and its positions, if it is not the whole."""
        if self.dims.cp == 1:
            return (tokens.to(self.device), targets.to(self.device)), None
        positions = position_ids(tokens.shape[1], self.dims, device=self.device)
        tokens, targets = (split_sequence(tensor, self.dims).to(self.device) for tensor in (tokens, targets))
        return (tokens, targets), positions

    def autocast(self) -> AbstractContextManager[object]:
        """Around each forward: the precision, where the model does not cast itself."""
        if self.options.precision != "fp32" and not self._casts_itself:
            return torch.autocast(self.device.type, dtype=COMPUTE_DTYPES[self.options.precision])
        return nullcontext()

    @property
    def _casts_itself(self) -> bool:
        if self.options.parallel == "pipe":
            return self.options.data_parallel == "fsdp" and self.dims.size("fsdp") > 1
        return self.options.parallel == "fsdp"

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[object]:
        """Around each micro-batch: reduces gradients at the last one only, where that costs no memory."""
        if last:
            return nullcontext()
        if isinstance(self.model, DistributedDataParallel):
            return self.model.no_sync()
        if self.options.parallel in ("fsdp", "sharded-ddp") and not self.options.sync_each_micro_batch:
            context: AbstractContextManager[object] = self.model.no_sync()  # type: ignore[operator]
            return context
        return nullcontext()

    def params(self) -> list[nn.Parameter]:
        """The parameters as they are after the last step; local shards with fsdp."""
        if isinstance(self.optimizer, OSS):
            self.optimizer.wait()  # Gathers of what other ranks have updated may still run.
        return list(self.raw_model.parameters())

    def params_with_gradients(self) -> list[nn.Parameter]:
        """The parameters that have gradients when the optimizer steps."""
        return self.optimizer.params_with_gradients if isinstance(self.optimizer, OSS) else self.params()


def make_engine(
    model: nn.Module,
    options: ParallelOptions,
    optimizer_options: OptimizerOptions,
    dims: ParallelDims,
    device: torch.device,
    progress: ProgressCallback | None = None,
    source: TransformersSource | None = None,
) -> Engine:
    """Moves a model, equal on all ranks, to the device, parallelizes it and makes its optimizer.

    With pipe or fsdp it may be on the meta device, but not with tensor parallelism. With fsdp each block is a unit, the
    rest (embedding, last norm, head) is the root unit, and `progress` is called after each was initialized.
    """
    checkpoint_blocks(model, options.checkpoint_activations, offload=options.offload_activations)
    pieces = options.overlap_pieces
    parallelize_blocks(model, dims, sequence_parallel=options.sequence_parallel, overlap_pieces=pieces)
    if options.parallel == "pipe":
        assert isinstance(model, GPT)
        pipeline = PipelineEngine(model, options, dims, device)
        optimizer = _make_optimizer(pipeline, options, optimizer_options, dims)
        return Engine(pipeline, pipeline, optimizer, options, device, dims)
    if options.parallel != "fsdp" or not next(model.parameters()).is_meta:
        model.to(device)
    if options.parallel == "fsdp":
        shard_options = ShardOptions(init=_init_of(model, source), compute_device=device)
        shard_units(model, blocks_policy(model), dims, progress, options=shard_options, **sharding_of(options))
    elif dims.ep > 1:
        average_replicated_gradients(model, dims)
    if source is not None:
        source.load(model, torch.device("cpu") if options.cpu_offload else device, group_of(dims, "loss"))
    optimizer = _make_optimizer(model, options, optimizer_options, dims)
    called: nn.Module = model
    if isinstance(optimizer, OSS) and options.parallel == "sharded-ddp":
        called = ShardedDataParallel(model, optimizer)
    elif options.parallel in ("ddp", "oss") and dims.size("edp") > 1:
        same_params = dims.process_group("edp")
        called = DistributedDataParallel(model, process_group=same_params, gradient_as_bucket_view=True)
    return Engine(called, model, optimizer, options, device, dims)


def _make_optimizer(
    model: nn.Module, parallel: ParallelOptions, options: OptimizerOptions, dims: ParallelDims
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
    arguments: dict[str, Any] = {"lr": options.lr, "betas": (0.9, 0.95)}
    arguments |= (
        {"fused": True} if options.optimizer_kernel == "fused" else {"foreach": options.optimizer_kernel == "foreach"}
    )
    if parallel.parallel in ("oss", "sharded-ddp"):
        return OSS(groups, AdamW, dims, **arguments)
    return AdamW(groups, **arguments)


def _init_of(model: nn.Module, source: TransformersSource | None) -> Callable[[nn.Module], None] | Literal[False]:
    """What initializes the modules of a model on the meta device; False where weights are loaded afterwards."""
    if source is None:
        assert isinstance(model, GPT)
        return model.init_weights
    return False if source.has_weights else source.initializer(model)
