"""Hooks that compare, while a divided model trains, values that must be the same on all ranks of its group.

Tensor parallel ranks compute the same outside of the divided layers: on the same batch, with equal norms and biases.
Where one of them does not, the sums over ranks are of numbers that don't belong together, and no shape shows it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils import _pytree as pytree

from scale_core.comm.group import Group
from scale_core.compat import active_fake_mode
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import compare_inputs, compare_replicas
from scale_core.consistency.execution_order import OptimizerSteps
from scale_core.hooks.module_parts import ForEachShardHook
from scale_core.optim.step_checks import register_step_recorder
from scale_tp.rank_checks import (
    EVERY_FORWARDS,
    FIRST_FORWARDS,
    compare_optimizer_steps,
    is_replica,
    is_reproducible,
)


class ReplicaCheck(ForEachShardHook):
    """Forward pre-hook of a model: compares the replicated parameters, every `every` forwards.

    With `only_reproducible` those on devices where equal computations have equal results, to the bit.
    """

    def __init__(self, group: Group, every: int, *, only_reproducible: bool) -> None:
        self._group, self._every, self._only_reproducible = group, every, only_reproducible
        self._num_forwards = 0

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self._num_forwards += 1
        if self._num_forwards % self._every == 1 % self._every:
            named = [(name, param) for name, param in model.named_parameters() if self._is_replica(param)]
            compare_replicas(named, Contract(self._group), self._num_forwards)

    def _is_replica(self, param: nn.Parameter) -> bool:
        return is_replica(param, self._group) and (not self._only_reproducible or is_reproducible(param))


class OptimizerStepCheck(ForEachShardHook):
    """Forward pre-hook of a model: compares the steps of the ranks' optimizers, and which parameters train.

    Tensor parallel ranks compare nothing at the end of a pass. So they do this in the first forwards with gradients,
    and in every tenth one after them; each comparison is of all steps since the last one.
    """

    def __init__(self, group: Group) -> None:
        self._contract = Contract(group)
        self._num_forwards: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # Of the model, or of its parts.

    @property
    def recorded_steps(self) -> OptimizerSteps:
        """Those since the last comparison."""
        return self._contract.recorded_steps

    def params(self) -> Iterable[nn.Parameter]:
        """Those of all parts that have run."""
        return (param for model in self._num_forwards for param in model.parameters())

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if threading.current_thread() is not threading.main_thread():
            return  # A part of a pipeline in one process; its turns are not the same on all ranks.
        if model not in self._num_forwards:  # A copy of the model has a copy of this hook.
            self._num_forwards[model] = 0
            register_step_recorder(self)
        number = self._num_forwards[model] = self._num_forwards[model] + 1
        if number <= FIRST_FORWARDS or number % EVERY_FORWARDS == 0:
            compare_optimizer_steps(self._contract, model.named_parameters)

    def __getstate__(self) -> dict[str, Any]:
        contract = copy.copy(self._contract)  # Without the record of the model of this hook.
        contract.recorded_steps, contract.named_params = OptimizerSteps(), tuple
        return {"_contract": contract}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._num_forwards = WeakKeyDictionary()


def register_input_checks(modules: Mapping[str, nn.Module], group: Group) -> None:
    """Makes the forwards of modules, by name, errors where ranks of the group give them different tensors."""
    for path, module in modules.items():
        check = partial(_compare, path or type(module).__name__, group)
        module.register_forward_pre_hook(check, with_kwargs=True)


def _compare(path: str, group: Group, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if torch.compiler.is_compiling() or active_fake_mode() is not None or group.backend == "fake":
        return
    trees = ((kind, pytree.tree_flatten_with_path(tree)[0]) for kind, tree in (("args", args), ("kwargs", kwargs)))
    leaves = [(kind + pytree.keystr(path), value) for kind, flat in trees for path, value in flat]
    tensors = [(name, value) for name, value in leaves if isinstance(value, torch.Tensor) and not value.is_meta]
    compare_inputs(tensors, path, group)
