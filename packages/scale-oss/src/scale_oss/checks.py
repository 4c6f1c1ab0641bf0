"""What a `ShardedDataParallel` refuses: parameters whose gradients nobody would average, or two would.

They would train on, each rank by itself, and nobody would see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scale_core.group import GroupLike, group_of
from scale_core.shard import unit_shard_of
from scale_oss.bucket import Bucket
from scale_oss.optimizer import OSS


def without_wrappers(optimizer: Any) -> Any:
    """Returns the OSS that a wrapper such as AdaScale has as its `optimizer`; what wraps none, as it is."""
    inner = optimizer
    while isinstance(inner, Optimizer) and not isinstance(inner, OSS):
        inner = getattr(inner, "optimizer", None)
    return inner if isinstance(inner, OSS) else optimizer


def check_optimizers(module: nn.Module, optimizers: Sequence[OSS], process_group: GroupLike) -> None:
    """Refuses optimizers that can't be given averaged gradients of this module.

    Raises:
        TypeError: One is no `OSS`.
        ValueError: There is none, or they are on different ranks; somebody else reduces for one of them, or for the
            model; a parameter is in two of them, or trains and is in none.
    """
    for name, member in module.named_modules():
        if isinstance(member, DistributedDataParallel):
            what = f"'{name}'" if name else "the model"
            raise ValueError(
                f"ShardedDataParallel: {what} is under DistributedDataParallel, which "
                "would average the same gradients: wrap the plain model, ShardedDataParallel(model.module, optimizer)"
            )
    for optimizer in optimizers:
        if not isinstance(optimizer, OSS):
            raise TypeError(
                f"ShardedDataParallel: expected sharded_optimizer to be an OSS, got {type(optimizer).__name__}: "
                "build OSS(model.parameters(), torch.optim.AdamW, lr=...), or take DistributedDataParallel"
            )
        if optimizer.reduced_by is not None and optimizer.reduced_by() is not None:
            raise ValueError(
                "ShardedDataParallel: a wrapper that is still there reduces the gradients of this optimizer already: "
                "wrap the model once, or drop the wrapper (del model) before another one is built"
            )
    if not optimizers:
        raise ValueError("ShardedDataParallel: expected an OSS or several, got none")
    groups = {optimizer.group.ranks for optimizer in optimizers}
    if process_group is not None:
        groups.add(group_of(process_group).ranks)
    if len(groups) > 1:
        raise ValueError(
            f"ShardedDataParallel and its optimizers are on different ranks: {sorted(map(list, groups))}: pass the "
            "same group to OSS(..., group=group) and ShardedDataParallel(..., process_group=group)"
        )
    held: dict[int, str] = {}
    for optimizer in optimizers:
        for bucket in optimizer.buckets:
            for param, name in zip(bucket.params, bucket.names, strict=True):
                if id(param) in held:
                    raise ValueError(f"'{name}' is in two of the optimizers: give each parameter to one of them")
                held[id(param)] = name
    check_held(module, [bucket for optimizer in optimizers for bucket in optimizer.buckets])


def check_held(module: nn.Module, buckets: Sequence[Bucket]) -> None:
    """Refuses parameters that train, and that no optimizer holds.

    They are other ones than before after `load_state_dict(..., assign=True)`, and new ones may train.

    Raises:
        ValueError: There is one.
    """
    held = {id(param) for bucket in buckets for param in bucket.params}
    named = ((name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) not in held)
    name, param = next(named, ("", None))
    if param is None:
        return
    if unit_shard_of(param) is not None:
        raise ValueError(
            f"'{name}' is a shard, and a sharded model averages its gradients by itself: train it as it is, without "
            "ShardedDataParallel, with the OSS alone"
        )
    raise ValueError(
        f"'{name}' trains, but no optimizer holds it, so its gradient would never be averaged: add it to OSS(...), "
        "freeze it by requires_grad_(False), or, if load_state_dict(..., assign=True) has put it there, load without "
        "assign"
    )
