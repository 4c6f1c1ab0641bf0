"""An optimizer's full state by numbers, as FairScale gathers it, and by names, as scale-fsdp does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import scale_fsdp
from scale_core.state.torch_state_dict import SHARDS, install_hooks
from scale_fsdp.state_dict.naming import slices_in, with_param_names
from scale_fsdp.state_dict.optimizer import saved_groups


def by_number(full: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state by names in torch's form: parameters have numbers, in the order of the groups."""
    names = [name for group in full["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    return {**with_param_names(full, numbers), "param_id_map": numbers, "uncollected_local_ids": []}


def by_name(full: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Returns what `by_number` has made as it was; the argument is not changed.

    Raises:
        ValueError: It does not say which parameter has which number, as a file of FairScale's own.
    """
    if full is None or all(isinstance(name, str) for group in full["param_groups"] for name in group["params"]):
        return full
    names = {number: name for name, number in full.get("param_id_map", {}).items() if isinstance(name, str)}
    if lacking := [number for group in full["param_groups"] for number in group["params"] if number not in names]:
        raise ValueError(
            f"this optimizer state does not say which parameter has number {lacking[0]}, as one that FairScale has "
            "gathered: start with a fresh optimizer, or gather it by this package"
        )
    state = {key: value for key, value in full.items() if key not in ("param_id_map", "uncollected_local_ids")}
    return with_param_names(state, names)


def shard_by_number(full: Mapping[str, Any] | None, model: nn.Module) -> dict[str, Any]:
    """Returns this rank's shard of a state by names in torch's form, with what a rank's own state says of its elements.

    Raises:
        TypeError: It is None.
        ValueError: It belongs to another model.
    """
    shard = scale_fsdp.shard_optim_state_dict(full, model)  # type: ignore[arg-type]  # None is refused there.
    assert full is not None
    like_saved = Optimizer([{"params": params} for params in saved_groups(full, slices_in(model))], {})
    install_hooks(like_saved)
    local_state = like_saved.state_dict()
    return {**shard, SHARDS: local_state[SHARDS]} if SHARDS in local_state else shard


def is_singleton_tensor(value: Any) -> bool:
    """Whether this is a tensor of no dimension, as Adam's `step`."""
    return isinstance(value, Tensor) and value.dim() == 0


__all__ = ["by_name", "by_number", "is_singleton_tensor", "shard_by_number"]
