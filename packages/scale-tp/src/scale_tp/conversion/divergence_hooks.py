"""Hooks that compare, while a divided model trains, what must be the same on all ranks of its group.

Tensor parallel ranks compute the same outside of the divided layers: on the same batch, with equal norms and biases.
Where one of them does not, the sums over ranks are of numbers that don't belong together, and no shape shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from scale_core.comm.group import Group
from scale_core.compat import active_fake_mode
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import compare_inputs, compare_replicas
from scale_core.hooks.module_parts import ForEachShardHook
from scale_core.shard import Placement, shard_of


class ReplicaCheck(ForEachShardHook):
    """Forward pre-hook of a model: compares the replicated parameters, every so many forwards."""

    def __init__(self, group: Group, every: int) -> None:
        self._group, self._every = group, every
        self._num_forwards = 0

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._num_forwards += 1
        if self._num_forwards % self._every == 1 % self._every:
            named = [(name, param) for name, param in model.named_parameters() if self._is_replica(param)]
            compare_replicas(named, Contract(self._group), self._num_forwards)

    def _is_replica(self, param: nn.Parameter) -> bool:
        # What a unit has gathered says nothing of itself until it is released.
        shard = shard_of(param)
        axes = () if shard is None else shard.axes
        return any(axis.group == self._group and axis.placement is Placement.REPLICATE for axis in axes)


def register_input_checks(modules: Mapping[str, nn.Module], group: Group) -> None:
    """Makes the forwards of modules, by name, errors where ranks of the group give them different tensors."""
    for path, module in modules.items():
        check = partial(_compare, path or type(module).__name__, group)
        module.register_forward_pre_hook(check, with_kwargs=True)


def _compare(path: str, group: Group, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or active_fake_mode() is not None or group.backend == "fake":
        return
    given = ((what, pytree.tree_flatten_with_path(tree)[0]) for what, tree in (("args", args), ("kwargs", kwargs)))
    leaves = [(what + pytree.keystr(place), value) for what, found in given for place, value in found]
    tensors = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor) and not value.is_meta]
    compare_inputs(tensors, path, group)
