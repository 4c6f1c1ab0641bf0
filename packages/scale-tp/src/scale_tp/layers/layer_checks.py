"""Comparisons of tensor parallel ranks that train layers built by hand, not by `parallelize`.

No model says where a pass begins. So the layers of a group count: a layer that is called again, while nobody has begun
a pass since it was last called, begins one. In some passes the ranks compare the steps of their optimizers, which
parameters of the layers train, and parameters that are not divided and have been equal so far.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
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
from scale_core.errors import ScaleDistributedError
from scale_core.optim.step_checks import invalidate_cache, register_step_recorder
from scale_core.optim.step_hooks import OptimizerSteps
from scale_core.shard import shard_of
from scale_tp.rank_checks import EVERY_FORWARDS, FIRST_FORWARDS, compare_optimizer_steps, is_replica, is_reproducible


class LayerChecks:
    """The layers of one group that were built by hand, in their passes."""

    def __init__(self) -> None:
        self._num_passes = self._first_pass = 0  # The latter is the one in which a layer last came.
        self._is_new = False  # The last layer ran for the first time.
        self._last_pass: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # Of each layer that has run.
        self._contract: Contract | None = None
        self._steps = OptimizerSteps()
        self._is_asked_for = EVERY_VARIABLE in os.environ
        self._check_every = check_interval(None)
        self._equal_values = EqualValues()
        # Layers and parameters that may be replicas are numbered as they come: ranks may forget them at other times.
        self._numbers: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._titles = WeakIdKeyDictionary()
        self._count = itertools.count()

    @property
    def recorded_steps(self) -> OptimizerSteps:
        """The steps since the last comparison."""
        return self._steps

    def params(self) -> Iterator[Tensor]:
        """The parameters of all layers that have run."""
        return (param for layer in self._last_pass for param in layer.parameters(recurse=False))

    def before_forward(self, layer: nn.Module, group: Group) -> None:
        """Begins a pass where the layer has run in the current one; all ranks of the group call it together."""
        last_pass = self._last_pass.get(layer)
        if last_pass is None:
            self._add(layer, group)
        elif last_pass == self._num_passes:
            self._num_passes += 1
            self._compare()
        self._is_new = last_pass is None
        self._last_pass[layer] = self._num_passes

    def _add(self, layer: nn.Module, group: Group) -> None:
        """Takes in a layer that runs for the first time; steps before that are not compared any more."""
        self._num_passes += not self._is_new  # Layers of an earlier model, which ranks may still have, are not in it.
        self._set_contract(group)
        self._first_pass = self._num_passes
        self._numbers[layer] = next(self._count)
        weakref.finalize(layer, self._forget_steps).atexit = False
        register_step_recorder(self)
        invalidate_cache()  # Optimizers record their steps on its parameters, too.

    def _set_contract(self, group: Group) -> None:
        self._contract, self._steps = Contract(group), OptimizerSteps()
        self._contract.recorded_steps = self._steps

    def _forget_steps(self) -> None:
        """Drops recorded steps, which hold parameters, when no layer is left; the group may have ended by then."""
        if self._contract is not None and not self._last_pass:
            self._contract.recorded_steps = self._steps = OptimizerSteps()

    def _compare(self) -> None:
        assert self._contract is not None
        number = self._num_passes - self._first_pass
        compares_steps = number < FIRST_FORWARDS or number % EVERY_FORWARDS == 0
        compares_values = self._check_every and (number <= FIRST_PASSES or number % self._check_every == 0)
        if not compares_steps and not compares_values:
            return
        named: dict[str, Tensor] = {}
        for kind, param in self.recorded_steps.params():
            if self._is_replica(param):
                if param not in self._titles:
                    self._titles[param] = f"parameter {next(self._count)} of {kind}"
                named[self._titles[param]] = param
        try:
            if compares_steps:
                compare_optimizer_steps(self._contract, self._named_params)
            if compares_values:
                self._equal_values.compare(list(named.items()), self._contract, self._num_passes)
        except ScaleDistributedError:
            self._set_contract(self._contract.group)  # Another model of this group may go on.
            raise

    def _named_params(self) -> Iterator[tuple[str, nn.Parameter]]:
        for layer, last_pass in self._last_pass.items():
            if last_pass == self._num_passes - 1:
                for name, param in layer.named_parameters(recurse=False):
                    yield f"{name} of {type(layer).__name__} {self._numbers[layer]}", param

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
