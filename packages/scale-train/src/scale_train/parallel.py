"""One model, three ways to spread it over ranks, behind the few verbs that the training loop needs.

The loop reads the same for all: call the model, go backward, clip, step. What differs between fully sharded, replicated
and plain stands here and nowhere else.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from scale_core.group import Group
from scale_core.shard import full_shape
from scale_fsdp import MixedPrecision, fully_shard
from scale_train.model import GPT
from scale_train.options import OptimizerOptions, ParallelOptions


@dataclass(frozen=True)
class Engine:
    """A model that is spread over the ranks of a group.

    Attributes:
        model: What is called: the model itself, or the replicating module around it.
        plain: The model itself, whose `named_parameters` have the plain names; local shards with fsdp.
        options: How it is spread.
        device: Where it computes.
    """

    model: nn.Module
    plain: GPT
    options: ParallelOptions
    device: torch.device

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
        if self.options.parallel == "fsdp" and self.options.no_sync:
            context: AbstractContextManager[object] = self.model.no_sync()  # type: ignore[operator]
            return context
        return nullcontext()

    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradients to a norm of at most `max_norm`; returns the norm before, a scalar."""
        if self.options.parallel == "fsdp":
            norm: Tensor = self.plain.clip_grad_norm_(max_norm)  # type: ignore[operator]
            return norm
        return nn.utils.clip_grad_norm_(self.plain.parameters(), max_norm)


def spread(model: GPT, options: ParallelOptions, group: Group, device: torch.device) -> Engine:
    """Puts a model on the device and spreads it as asked; the model must be equal on all ranks.

    Each block is a unit of its own with fsdp, and the rest (embedding, last norm, head) is the outer unit.
    """
    model.to(device)
    if options.parallel == "fsdp":
        mixed = options.precision == "bf16" and MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(
                block,
                group.process_group,
                reshard_after_forward=options.reshard_after_forward,
                mixed_precision=mixed,
            )
        fully_shard(
            model, group.process_group, reshard_after_forward=options.reshard_after_forward, mixed_precision=mixed
        )
        return Engine(model, model, options, device)
    if options.parallel == "ddp" and group.process_group is not None:
        replicated = DistributedDataParallel(model, process_group=group.process_group, gradient_as_bucket_view=True)
        return Engine(replicated, model, options, device)
    return Engine(model, model, options, device)


def make_optimizer(engine: Engine, options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW, with weight decay on matrices only."""
    params = list(engine.plain.parameters())
    # The whole parameter's shape: a local shard may have fewer dimensions, and must not change its group for it.
    matrices = [param for param in params if len(full_shape(param)) >= 2]
    vectors = [param for param in params if len(full_shape(param)) < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95), fused=options.fused)
