"""Checks of `ShardedDataParallel`: which optimizers and parameters it takes, and what may be loaded into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from scale_core.comm.group import GroupLike, group_of
from scale_core.parameters import check_memory_unshared
from scale_core.shard import unit_shard_of
from scale_core.sharded_tensor.replicated_parameter import reduced_gradient_of
from scale_oss.buckets.bucket import Bucket
from scale_oss.oss import OSS


def unwrap_optimizer(optimizer: Any) -> Any:
    """Returns the OSS that a wrapper, for example AdaScale, has as its `optimizer`; any other optimizer unchanged."""
    inner = optimizer
    while isinstance(inner, Optimizer) and not isinstance(inner, OSS):
        inner = getattr(inner, "optimizer", None)
    return inner if isinstance(inner, OSS) else optimizer


def check_optimizers(module: nn.Module, optimizers: Sequence[OSS], process_group: GroupLike) -> None:
    """Checks that the optimizers can be given the averaged gradients of this module."""
    for name, member in module.named_modules():
        if isinstance(member, DistributedDataParallel):
            subject = f"'{name}'" if name else "the model"
            raise ValueError(
                f"ShardedDataParallel: {subject} is under DistributedDataParallel, which "
                "would average the same gradients. Wrap the plain model, ShardedDataParallel(model.module, optimizer)"
            )
    for optimizer in optimizers:
        if not isinstance(optimizer, OSS):
            raise TypeError(
                f"ShardedDataParallel: expected sharded_optimizer to be an OSS, got {type(optimizer).__name__}. "
                "Build OSS(model.parameters(), torch.optim.AdamW, lr=...), or take DistributedDataParallel"
            )
        if optimizer.reduced_by is not None and optimizer.reduced_by() is not None:
            raise ValueError(
                "ShardedDataParallel: another wrapper reduces the gradients of this optimizer already. Wrap the model "
                "once, or delete that wrapper (del model) before another one is built"
            )
    if not optimizers:
        raise ValueError("ShardedDataParallel: expected an OSS or several, got none")
    groups = {optimizer.shard_group.ranks for optimizer in optimizers}
    if process_group is not None:
        groups.add(group_of(process_group, "edp").ranks)
    if len(groups) > 1:
        raise ValueError(
            f"ShardedDataParallel and its optimizers are on different ranks: {sorted(map(list, groups))}. Pass the "
            "same group to OSS(..., group=group) and ShardedDataParallel(..., process_group=group)"
        )
    holders: dict[int, str] = {}
    for optimizer in optimizers:
        for bucket in optimizer.buckets:
            for param, name in zip(bucket.params, bucket.names, strict=True):
                if id(param) in holders:
                    raise ValueError(f"'{name}' is in two of the optimizers. Give each parameter to one of them")
                holders[id(param)] = name
    buckets = [bucket for optimizer in optimizers for bucket in optimizer.buckets]
    check_params_held(module, buckets)
    moved = [memory for bucket in buckets for memory in bucket.original_memory]
    others = [(name, tensor) for name, tensor in (*module.named_parameters(), *module.named_buffers())]
    check_memory_unshared("ShardedDataParallel", (), others, moved)


def check_params_held(module: nn.Module, buckets: Sequence[Bucket]) -> None:
    """Checks that every parameter that trains is in an optimizer; after `load_state_dict(assign=True)` some are not."""
    bucketed = {id(param) for bucket in buckets for param in bucket.params}
    named = ((name, p) for name, p in module.named_parameters() if p.requires_grad and id(p) not in bucketed)
    name, param = next(named, ("", None))
    if param is None:
        return
    if unit_shard_of(param) is not None:
        raise ValueError(
            f"'{name}' is a shard, and a sharded model averages its gradients by itself. Train it with the OSS alone, "
            "without ShardedDataParallel"
        )
    raise ValueError(
        f"'{name}' trains, but no optimizer holds it, so its gradient would never be averaged. Add it to OSS(...), "
        "freeze it by requires_grad_(False), or, if load_state_dict(..., assign=True) has put it there, load without "
        "assign"
    )


def copy_what_is_assigned(
    module: nn.Module, state_dict: Mapping[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    """Before `load_state_dict(assign=True)`: values are copied to the parameters, which have their memory in buckets.

    Raises:
        ValueError: Parameters would get another dtype; nothing was loaded.
    """
    if not local_metadata.get("assign_to_params_buffers"):
        return
    for name, param in module.named_parameters():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and value.dtype != param.dtype and reduced_gradient_of(param) is not None:
            raise ValueError(
                f"load_state_dict(assign=True): '{prefix + name}' is {value.dtype} in the state and {param.dtype} in "
                "the model, whose optimizer has a buffer of that dtype. Load without assign, which converts the "
                f"values, or convert the model before OSS(...) is built, model.to({value.dtype})"
            )
    if any(reduced_gradient_of(param) is not None for param in module._parameters.values() if param is not None):
        local_metadata["assign_to_params_buffers"] = False


def check_takes_hooks(module: nn.Module) -> None:
    """Checks that all modules take hooks, which wait for gathered parameters."""
    if any(isinstance(child, torch.jit.ScriptModule) for child in module.modules()):
        raise ValueError(
            "ShardedDataParallel: a torch.jit.ScriptModule in the module takes no hooks. With overlap_gather=True "
            "nothing could wait there for the parameters. Write overlap_gather=False"
        )
