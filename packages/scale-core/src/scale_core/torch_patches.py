"""torch's own functions on shards: clipping, gradient scaling, wrapping, vectors and saving.

Programs call `torch.nn.utils.clip_grad_norm_`, wrap by `DistributedDataParallel`, make vectors of parameters, scale by
`GradScaler` and save `optimizer.state_dict()`. On shards these would silently compute with one rank's. So they are
patched when the first tensor of the process is registered as a shard, or the first pipeline is built, and not before.
With parameters that are no shards they do what they always did.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
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
    gradient_holders,
    has_gradient_keeper,
    has_kept_gradients,
    is_shared,
    measured_gradients,
    norm_of,
    warn_if_used_up,
)
from scale_core.shard import check_undivided, is_divided, on_first_shard, registered_parameters, shard_of, stages_of
from scale_core.state.torch_state_dict import install_hooks


@functools.cache
def install() -> None:
    """Patches torch's functions, also for those who imported them by name; once is enough."""
    compat.wrap_no_grad_function(torchs.clip_grad_norm_, _clip_grad_norm)
    compat.wrap_no_grad_function(torchs.clip_grad_value_, _clip_grad_value)
    compat.wrap_no_grad_function(torchs._get_total_norm, _get_total_norm)
    compat.wrap_no_grad_function(torchs._clip_grads_with_norm_, _clip_grads_with_norm)
    compat.hook_parameter_vectors(_refuse_vector)
    register_module_module_registration_hook(_refuse_replicas)
    GradScaler._unscale_grads_ = _refuse_lone_scaler(GradScaler._unscale_grads_)  # type: ignore[method-assign]
    Optimizer.state_dict = _with_hooks(Optimizer.state_dict)  # type: ignore[method-assign]
    Optimizer.load_state_dict = _with_hooks(Optimizer.load_state_dict)  # type: ignore[method-assign]


on_first_shard(install)


# Clipping. Each function gets torch's own one first, and then what that was called with.


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
    if not stages and not any(is_shared(each.holder) for each in gradients):
        if params and all(each.grad is None for each in gradients):
            return torch.zeros(())  # As torch says; a norm of no gradients would not know whose they are not.
        holders = [each.holder for each in gradients]
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
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not given and has_kept_gradients():
        raise RuntimeError(
            "get_total_norm: got no gradients. A model under ShardedDataParallel has its averaged ones in the "
            "optimizer's pieces and none in param.grad: for their norm, call torch.nn.utils.clip_grad_norm_("
            "model.parameters(), max_norm), which returns it (max_norm=math.inf only measures). If these are another "
            "model's, it has no gradients: leave the call out"
        )
    owners = _owners_of(given)
    gradients = [MeasuredGradient(owner, owner, tensor) for owner, tensor in zip(owners, given, strict=True)]
    stages = stages_of(owners)
    if not stages and not any(is_shared(owner) for owner in owners):
        return own(given, norm_type, error_if_nonfinite, foreach)
    norm = norm_of(gradients, float(norm_type), stages=stages)
    if error_if_nonfinite:
        check_finite(norm, norm_type)
    return norm


def _clip_grads_with_norm(
    own: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    total_norm: Tensor,
    foreach: bool | None = None,
) -> None:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    own(gradient_holders(params), max_norm, total_norm, foreach)


def _clip_grad_value(
    own: Callable[..., None],
    parameters: Tensor | Iterable[Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    with_gradient = [holder for holder in gradient_holders(params) if holder.grad is not None]
    if with_gradient:  # Of none torch makes an error, and one rank alone may have none.
        own(with_gradient, clip_value, foreach)


def _owners_of(tensors: list[Tensor]) -> list[Tensor]:
    """For each tensor, the registered parameter that it is the gradient of, or else itself."""
    # torch keeps the object that it has given as `param.grad` while it is referenced, so identity tells.
    leaves = (param for param in registered_parameters() if param.is_leaf)
    by_grad = {id(grad): (grad, param) for param in leaves if (grad := param.grad) is not None}
    owners = []
    for tensor in tensors:
        grad, param = by_grad.get(id(tensor), (None, tensor))
        owners.append(param if grad is tensor else tensor)
    return owners


# Scaling.


def _refuse_lone_scaler(own: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses torch's scaler on sharded gradients: it looks for inf and NaN on one rank alone."""
    # A scaler that has its own method, as ours and that of torch's FSDP, has the ranks agree.

    @functools.wraps(own)
    def unscale(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self)._unscale_grads_ is unscale:
            for param in (param for group in optimizer.param_groups for param in group["params"]):
                if (shard := shard_of(param)) is not None and is_divided(param):
                    raise RuntimeError(
                        f"{type(self).__name__}.step({type(optimizer).__name__}): torch's scaler looks for inf and NaN "
                        f"in this rank's gradients alone, and of {shard.title} other ranks have other elements: some "
                        "would step and others not. Write scaler = scale_core.ShardedGradScaler(...), which has all "
                        "ranks agree"
                    )
        return own(self, optimizer, *args, **kwargs)

    return unscale


# Wrapping.


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
                "by itself: train it as it is, without DistributedDataParallel; for replicas of it, pass fully_shard a "
                "mesh of two dimensions"
            )
    if (kept := next((listed for listed, param in params if has_gradient_keeper(param)), None)) is not None:
        raise ValueError(
            f"DistributedDataParallel: '{kept}' and others are under ShardedDataParallel, which averages their "
            "gradients: train that as it is, without DistributedDataParallel"
        )


# Vectors of parameters.


def _refuse_vector(param: Any) -> None:
    """Refuses a vector of parameters of which other ranks have other elements."""
    # It would be that of another model, of another size on each rank; and one put into them would stand elsewhere.
    shard = shard_of(param) if isinstance(param, Tensor) and is_divided(param) else None
    if shard is not None:
        where = (
            "Call them where parameters are full: with model.summon_full_params(): vector = "
            "parameters_to_vector(model.parameters())"
            if shard.gathered
            else "Take the full tensors of model.state_dict(), which all ranks call together"
        )
        raise RuntimeError(
            f"parameters_to_vector, vector_to_parameters: {shard.title} is a shard, {list(param.shape)} of "
            f"{list(shard.shape)}, and other ranks have other elements of it. {where}"
        )


# Saving.


def _with_hooks(own: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of Optimizer, to install the state-dict hooks of an optimizer on shards first."""

    @functools.wraps(own)
    def with_hooks(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        install_hooks(self, loads=args[0] if args else kwargs.get("state_dict"))
        return own(self, *args, **kwargs)

    return with_hooks
