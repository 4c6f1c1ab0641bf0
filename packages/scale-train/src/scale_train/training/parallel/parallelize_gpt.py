"""The blocks of a GPT, divided by tensor parallelism and sharded by units; other models carry their own plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scale_core.comm.mesh import ParallelDims
from scale_fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    class_policy,
    fully_shard,
    fully_shard_modules,
    no_split_policy,
)
from scale_fsdp.wrapping.policy import Candidate, Policy
from scale_moe import Experts
from scale_tp.attention_heads import AttentionRule
from scale_tp.conversion.parallelize import parallelize
from scale_tp.conversion.styles import Plan, Style
from scale_train.configuration.resolve import pipeline_shape
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT, Block
from scale_train.options import ParallelOptions
from scale_train.training.reports.reporters import ProgressCallback


def parallel_dims(options: ParallelOptions, num_ranks: int) -> ParallelDims:
    """Returns how ranks stand in axes by the options; `dp_shard` has the ranks with different parts of the batch."""
    return ParallelDims(
        cp=options.context_parallel,
        tp=options.tensor_parallel,
        pp=pipeline_shape(options, num_ranks).ranks if options.parallel == "pipe" else 1,
        ep=options.expert_parallel,
        world_size=num_ranks,
    )


def tensor_plan(config: ModelConfig) -> Plan:
    """Tensor parallelism of the blocks: two all-reduces in the forward and two in the backward of each.

    The embedding of bytes is small, and is replicated. Experts divide themselves (`MoE`); shared ones, which
    all tokens pass, are layers like others.
    """
    plan: dict[str, str | Style] = {
        "blocks.*.attention.qkv": Style("outputs", output="part", stacked=3),
        "blocks.*.attention.out": "rowwise",
        r"blocks\.\d+\.(attention|feed)_norm": "replicate",
    }
    if config.experts and not config.shared_experts:
        return plan
    layer = "blocks.*.moe.shared_expert" if config.experts else "blocks.*"
    return plan | {f"{layer}.feed_in": "colwise", f"{layer}.feed_out": "rowwise"}


COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

ATTENTION_RULE = AttentionRule("scale-train's GPT", fused=("qkv",), heads=("heads",))


def parallelize_blocks(
    model: nn.Module, dims: ParallelDims, *, sequence_parallel: bool, overlap_pieces: int | None = None
) -> None:
    """Shards the layers of the blocks, in place, of a full model that is equal on all ranks.

    A model of transformers is divided by the plan that it carries.
    """
    if dims.tp > 1:
        parallelize(
            model,
            tensor_plan(model.config) if isinstance(model, GPT) else None,
            dims,
            sequence_parallel=sequence_parallel,
            overlap_pieces=overlap_pieces,
            attention_rules=(ATTENTION_RULE,),
        )


@dataclass(frozen=True)
class _StageUnits(Policy):
    """Each block of a stage is a unit; and so are the layers of tokens.

    These may share a weight, whose shards are then the same in the first and in the last stage.
    """

    layers_of_tokens: tuple[nn.Module, ...]

    def selects(self, candidate: Candidate) -> bool:
        is_one = isinstance(candidate.module, Block) or any(
            candidate.module is layer for layer in self.layers_of_tokens
        )
        return is_one and candidate.num_params > 0  # Of what other stages have there are placeholders.


def shard_stage(stage: nn.Module, model: GPT, dims: ParallelDims, options: ParallelOptions) -> None:
    """Shards a stage of a model among pipelines beside each other, in place."""
    shard_units(stage, _StageUnits((model.embedding, model.head)), dims, **sharding_of(options))


def sharding_of(options: ParallelOptions) -> dict[str, Any]:
    """Returns how `fully_shard` casts, releases and offloads."""
    policy = None
    if options.precision != "fp32":
        policy = MixedPrecisionPolicy(param_dtype=COMPUTE_DTYPES[options.precision], reduce_dtype=torch.float32)
    return {
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": policy,
        "offload_policy": CPUOffloadPolicy() if options.cpu_offload else None,
    }


def shard_units(
    model: nn.Module, units: Policy, dims: ParallelDims, progress: ProgressCallback | None = None, **how: Any
) -> None:
    """Shards the units of a model, in place: experts that ranks divide among those that have the same ones."""
    if dims.ep > 1:
        for experts in [module for module in model.modules() if isinstance(module, Experts)]:
            fully_shard(experts, dims, **how)
    fully_shard_modules(model, units, progress=progress, mesh=dims, **how)


def blocks_policy(model: nn.Module) -> Policy:
    """Returns which modules are sharded and recomputed one by one."""
    return class_policy(Block) if isinstance(model, GPT) else no_split_policy(model)
