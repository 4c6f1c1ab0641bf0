"""An `OSS` in the place of a plain optimizer, and full states of sharded optimizers."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from scale_core import ShardedGradScaler
from scale_fsdp import full_optim_state_dict, shard_optim_state_dict
from scale_fsdp.state_dict.naming import with_param_names
from scale_oss import OSS
from scale_oss.ddp_checks import unwrap_optimizer


def as_oss(optimizer: Optimizer, options: Mapping[str, Any]) -> Optimizer:
    """Returns an `OSS` with the class, the groups and the settings of a plain optimizer, or an `OSS` unchanged.

    Raises:
        ValueError: The optimizer has a state already, which an `OSS` would begin without.
    """
    if isinstance(unwrap_optimizer(optimizer), OSS):
        return optimizer
    if optimizer.state:
        raise ValueError(
            f"this {type(optimizer).__name__} has stepped already, and an OSS in its place would start over: give the "
            "strategy an optimizer that is fresh, then load the state into the one that it returns"
        )
    groups = []
    for group in optimizer.param_groups:
        names = group.get("param_names")
        params = group["params"] if names is None else list(zip(names, group["params"], strict=True))
        groups.append({**{key: group[key] for key in group if key != "param_names"}, "params": params})
    return OSS(groups, type(optimizer), **options, **optimizer.defaults)


def replace_in_schedulers(schedulers: Sequence[Any], replaced: Mapping[Optimizer, Optimizer]) -> None:
    """Has learning rate schedulers, and those inside of them, set the rates of the optimizers in place of others."""
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop()
        waiting += getattr(scheduler, "_schedulers", [])
        new = replaced.get(getattr(scheduler, "optimizer", cast(Any, None)))
        if new is not None and new is not scheduler.optimizer:
            scheduler.optimizer = new
            _count_steps(new)


def _count_steps(optimizer: Any) -> None:
    """Marks steps as a scheduler does when it is built: it warns of optimizers that it does not see stepping."""
    step = optimizer.step
    if hasattr(step, "_wrapped_by_lr_sched"):
        return

    @functools.wraps(step)
    def counted(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True
        return step(*args, **kwargs)

    cast(Any, counted)._wrapped_by_lr_sched = True
    optimizer.step = counted


def use_sharded_scaler(precision: Any) -> None:
    """Gives a precision plugin a scaler with which all ranks skip a step together, in place of torch's own."""
    scaler = getattr(precision, "scaler", None)
    if type(scaler) is GradScaler and scaler.is_enabled():
        precision.scaler = ShardedGradScaler(
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
        )


def whole_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Returns the state of a plain optimizer of the plain model on rank 0, and an empty dict elsewhere.

    All ranks call it together.
    """
    if isinstance(optimizer, OSS):
        optimizer.consolidate_state_dict()
        return optimizer.state_dict() if optimizer.shard_group.rank == 0 else {}
    full = full_optim_state_dict(module, optimizer)
    if full is None:
        return {}
    listed = [name for group in full["param_groups"] for name in group["params"]]
    return with_param_names(full, {name: number for number, name in enumerate(listed)})


def load_whole_optimizer_state(module: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Loads the state of a plain optimizer; each rank takes its elements, nothing is sent.

    Raises:
        ValueError: The state has other groups than the optimizer, or a tensor has another shape.
    """
    if isinstance(optimizer, OSS):
        optimizer.load_state_dict(dict(state))
        return
    named = {param: name for name, param in module.named_parameters()}
    named_groups = [[named[param] for param in group["params"]] for group in optimizer.param_groups]
    saved = [group["params"] for group in state["param_groups"]]
    if (sizes := list(map(len, named_groups))) != (saved_sizes := list(map(len, saved))):
        raise ValueError(
            f"the checkpoint has an optimizer of {saved_sizes} parameters by group, and this one has {sizes}: build "
            "the groups in configure_optimizers as they were when it was saved"
        )
    pairs = zip((n for group in saved for n in group), (n for group in named_groups for n in group), strict=True)
    full = with_param_names(state, dict(pairs))
    optimizer.load_state_dict(shard_optim_state_dict(full, module, optimizer))
