"""AdamW for a model under any `--parallel`."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import AdamW

from scale_core.comm.mesh import ParallelDims
from scale_core.shard import full_shape
from scale_oss import OSS
from scale_train.options import OptimizerOptions, ParallelOptions


def make_optimizer(
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
