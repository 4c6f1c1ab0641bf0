"""torch's own functions on shards: clipping, DistributedDataParallel and optimizers.

Programs call `torch.nn.utils.clip_grad_norm_`, wrap by `DistributedDataParallel` and build optimizers. On shards, these
functions need to know the other ranks. So they are patched when the process gets its first shard or pipeline.
Parameters that are not shards are treated as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad as torchs
from torch.optim import Optimizer

from scale_core import compat
from scale_core.comm.group import group_of
from scale_core.optim.clip_grad import (
    MeasuredGradient,
    check_finite,
    clip,
    is_shared,
    measured_gradients,
    norm_of,
    warn_if_used_up,
)
from scale_core.optim.step_hooks import step_on_local_tensors
from scale_core.shard import check_undivided, on_first_shard, on_local_tensors, shard_of, stage_parameters, stages_of
from scale_core.sharded_tensor.replicated_parameter import reduced_gradient_of
from scale_core.state.torch_state_dict import install_hooks


@functools.cache
def install() -> None:
    """Patches torch's functions, also for those who imported them by name; once is enough."""
    compat.wrap_no_grad_function(torchs.clip_grad_norm_, _clip_grad_norm)
    compat.wrap_no_grad_function(torchs.clip_grad_value_, _clip_grad_value)
    compat.wrap_no_grad_function(torchs._get_total_norm, _get_total_norm)
    register_module_module_registration_hook(_refuse_replicas)
    Optimizer.add_param_group = _with_hooks(Optimizer.add_param_group)  # type: ignore[method-assign]


on_first_shard(install)


# Clipping. Each function gets torch's own one first, and then its arguments.


def _clip_grad_norm(
    own: Callable[..., Tensor],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients, stages = measured_gradients(params), stages_of(params)
    if not params and stages:
        warn_if_used_up(parameters, stages)
    if not stages and not any(is_shared(gradient.holder) for gradient in gradients):
        if params and all(gradient.grad is None for gradient in gradients):
            return torch.zeros(())  # As torch says; a norm of no gradients would not know whose they are not.
        holders = [gradient.holder for gradient in gradients]
        # torch warns of a generator that has been used up, so it gets that.
        return own(holders or parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    return clip(gradients, float(max_norm), float(norm_type), stages=stages, error_if_nonfinite=error_if_nonfinite)


def _get_total_norm(
    own: Callable[..., Tensor],
    tensors: Tensor | Iterable[Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    owners = _owners_of(listed)
    gradients = [MeasuredGradient(owner, owner, tensor) for owner, tensor in zip(owners, listed, strict=True)]
    stages = stages_of(owners)
    if not stages and not any(is_shared(owner) for owner in owners):
        return own(listed, norm_type, error_if_nonfinite, foreach)
    norm = norm_of(gradients, float(norm_type), stages=stages)
    if error_if_nonfinite:
        check_finite(norm, norm_type)
    return norm


def _clip_grad_value(
    own: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if any(param.grad is not None for param in params):  # Of none torch makes an error; one rank alone may have none.
        own(params, clip_value, foreach)


def _owners_of(tensors: list[Tensor]) -> list[Tensor]:
    """For each tensor, the parameter of a pipeline's stage that it is the gradient of, or else itself."""
    # torch keeps the object that it has given as `param.grad` while it is referenced, so identity tells.
    by_grad = {id(param.grad): param for param in stage_parameters() if param.is_leaf and param.grad is not None}
    return [by_grad.get(id(tensor), tensor) for tensor in tensors]


# Wrapping.


@on_local_tensors
def _refuse_replicas(outer: nn.Module, name: str, inner: nn.Module | None) -> None:
    """Refuses DistributedDataParallel around a module that it would overwrite with rank 0's part."""
    # torch calls this where a module is put into another one: here when its group is known, and before it sends
    # anything.
    if not isinstance(outer, DistributedDataParallel) or inner is None:
        return
    ignored = set(getattr(inner, "_ddp_params_and_buffers_to_ignore", ()))
    params = [(listed, param) for listed, param in inner.named_parameters() if listed not in ignored]
    check_undivided(params, group_of(outer.process_group), "DistributedDataParallel")
    for listed, param in params:
        shard = shard_of(param)
        if shard is not None and shard.gathered:
            raise ValueError(
                f"DistributedDataParallel: '{listed}' is a shard {list(param.shape)} of a parameter "
                f"{list(shard.shape)}, and all ranks would get the first one's. A sharded model averages its gradients "
                "by itself: train it without DistributedDataParallel; for replicas of it, pass fully_shard a "
                "mesh of two dimensions"
            )
    if (
        replicated_name := next((listed for listed, param in params if reduced_gradient_of(param) is not None), None)
    ) is not None:
        raise ValueError(
            f"DistributedDataParallel: '{replicated_name}' and others are under ShardedDataParallel, which averages "
            "their gradients: train the model without DistributedDataParallel"
        )


# Optimizers.


def _with_hooks(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `Optimizer.add_param_group`, which constructors call: steps and state dicts then know of shards."""

    @functools.wraps(own)
    def add_param_group(self: Optimizer, param_group: dict[str, Any]) -> None:
        own(self, param_group)
        adopt(self)

    return add_param_group


def adopt(optimizer: Optimizer) -> None:
    """Makes an optimizer know of shards, if it is on some; any other refuses to load one rank's shard of a state."""
    install_hooks(optimizer, refuses_parts=True)
    step_on_local_tensors(optimizer)
