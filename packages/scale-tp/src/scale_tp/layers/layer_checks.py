"""What tensor parallel ranks compare while they train layers that were built by hand, not by `parallelize`.

No model says where a pass begins. So the layers of a group count: a layer that is called again, while nobody has begun
a pass since it was last called, begins one. In some passes the ranks compare the steps of their optimizers, which
parameters of the layers train, and parameters that are not divided and have been equal so far.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from scale_core.comm.group import Group
from scale_core.compat import graph_task_id
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import EVERY_VARIABLE, check_interval
from scale_core.consistency.equal_values import FIRST_PASSES, EqualValues
from scale_core.consistency.optimizer_steps import OptimizerSteps
from scale_core.errors import ScaleDistributedError
from scale_core.optim.step_checks import invalidate_cache, register_step_recorder
from scale_core.shard import shard_of
from scale_tp.rank_checks import EVERY_FORWARDS, FIRST_FORWARDS, compare_optimizer_steps, is_replica, is_reproducible


class LayerChecks:
    """The layers of one group that were built by hand, in their passes."""

    def __init__(self) -> None:
        self._num_passes = self._first_pass = 0  # The latter is the one in which a layer last came.
        self._last_pass: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # Of each layer that has run.
        self._contract: Contract | None = None
        self._is_asked_for = EVERY_VARIABLE in os.environ
        self._check_every = check_interval(None)
        self._equal_values = EqualValues()
        self._titles = WeakIdKeyDictionary()  # of parameters that may be replicas, numbered as they come

    @property
    def recorded_steps(self) -> OptimizerSteps:
        """The steps since the last comparison."""
        assert self._contract is not None
        return self._contract.recorded_steps

    def params(self) -> Iterator[Tensor]:
        """The parameters of all layers that have run."""
        return (param for layer in self._last_pass for param in layer.parameters(recurse=False))

    def before_forward(self, layer: nn.Module, group: Group) -> None:
        """Begins a pass where the layer has run in the current one; all ranks of the group call it together."""
        last_pass = self._last_pass.get(layer)
        if last_pass is None:
            self._contract = self._contract or Contract(group)
            self._first_pass = self._num_passes
            register_step_recorder(self)
            invalidate_cache()  # Optimizers record their steps on its parameters, too.
        elif last_pass == self._num_passes:
            self._num_passes += 1
            self._compare()
        self._last_pass[layer] = self._num_passes

    def _compare(self) -> None:
        assert self._contract is not None
        number = self._num_passes - self._first_pass
        compares_steps = number < FIRST_FORWARDS or number % EVERY_FORWARDS == 0
        compares_values = self._check_every and (number <= FIRST_PASSES or number % self._check_every == 0)
        if not compares_steps and not compares_values:
            return
        for kind, param in self.recorded_steps.params():
            if param not in self._titles and self._is_replica(param):
                self._titles[param] = f"parameter {len(self._titles)} of {kind}"
        try:
            if compares_steps:
                compare_optimizer_steps(self._contract, self._named_params)
            if compares_values:
                named = [(title, param) for param, title in self._titles.items()]
                self._equal_values.compare(named, self._contract, self._num_passes)
        except ScaleDistributedError:
            self._contract = Contract(self._contract.group)  # Another model of this group may go on.
            raise

    def _named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for number, layer in enumerate(self._last_pass):
            for name, param in layer.named_parameters(recurse=False):
                yield f"{name} of {type(layer).__name__} {number}", param

    def _is_replica(self, param: Tensor) -> bool:
        assert self._contract is not None
        is_candidate = shard_of(param) is None or is_replica(param, self._contract.group)
        return is_candidate and (self._is_asked_for or is_reproducible(param))


def before_forward(layer: nn.Module, args: Any) -> None:
    """Forward pre-hook of a layer; its attribute `group` has its ranks."""
    # Activation checkpoints call it again in the backward; parts of a pipeline in one process have threads.
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or graph_task_id() != -1:
        return
    group = cast(Group, layer.group)
    if group.size > 1 and group.process_group is not None and threading.current_thread() is threading.main_thread():
        group.state.get_or_create(LayerChecks).before_forward(layer, group)
