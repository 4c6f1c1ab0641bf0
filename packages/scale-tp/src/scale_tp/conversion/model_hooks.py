"""Hooks of a divided model: in its forwards ranks compare what has to be equal, and say so where one of them fails.

Tensor parallel ranks compute the same outside of the divided layers: on the same batch, with equal norms and biases.
Where one of them does not, the sums over ranks are of numbers that don't belong together, and no shape shows it.

They compare nothing at the end of a step, so they can't abort a step together. The rank that fails publishes its error,
and asks the others whether they have failed, too. Ranks that have failed go on as before. Ranks that wait for
something else do not answer, which ends the connections: they raise at once, with this rank's error. So this rank can't
run the pass again while the others are in the middle of it and take its messages for the ones that they wait for.
"""

from __future__ import annotations

import copy
import sys
import threading
import traceback
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils import _pytree as pytree

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_core.compat import active_fake_mode, ends_recomputation, graph_task_id
from scale_core.consistency.contract import Contract
from scale_core.consistency.divergence import compare_inputs, compare_replicas
from scale_core.consistency.flight_recorder import FlightRecorder
from scale_core.errors import TransferError, recovery_hint
from scale_core.hooks.autograd import before_backward, in_autograds_thread, register_post_backward
from scale_core.hooks.module_parts import ForEachShardHook
from scale_core.optim.step_checks import register_step_recorder
from scale_core.optim.step_hooks import OptimizerSteps
from scale_tp.failed_pass import LOST_EVENT, CommunicatorAbort, PassRecorder
from scale_tp.rank_checks import (
    EVERY_FORWARDS,
    FIRST_FORWARDS,
    compare_optimizer_steps,
    is_replica,
    is_reproducible,
)

# How long the other ranks may take to fail as well, where all of them do.
_GRACE_SECONDS = 5.0
# No other record has this many integers, so that no record of another check is taken for this one.
_RECORD = [0] * 9


class ReplicaCheck(ForEachShardHook):
    """Forward pre-hook of a model: compares the replicated parameters, every `every` forwards.

    With `only_reproducible` only the ones on devices where equal computations have equal results, to the bit.
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
        self._contract, self._steps = Contract(group), OptimizerSteps()
        self._contract.recorded_steps = self._steps
        self._num_forwards: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # Of the model, or of its parts.

    @property
    def recorded_steps(self) -> OptimizerSteps:
        """The steps since the last comparison."""
        return self._steps

    def params(self) -> Iterable[nn.Parameter]:
        """The parameters of all parts that have run."""
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
        contract, steps = copy.copy(self._contract), OptimizerSteps()  # Without the record of the model of this hook.
        contract.recorded_steps, contract.named_params = steps, tuple
        return {"_contract": contract, "_steps": steps}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._num_forwards = WeakKeyDictionary()


class FailedPass(ForEachShardHook):
    """Forward hook of a divided model, to be called after an error, too; all ranks of the group make it together."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._recorder = FlightRecorder(group)
        CommunicatorAbort.of(group)  # The group keeps it, so that a model with this hook can be pickled.
        self._backward = -1  # autograd's number of the backward whose end is waited for
        self._is_failed = False  # A backward has failed, and the others have not heard it.
        group.state.get_or_create(PassRecorder).recorder = ref(self._recorder)

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._is_failed:
            self._is_failed = False
            self._on_backward_failed()
        if output is not None:
            if torch.is_grad_enabled():
                before_backward(output, self._begin_backward)
            return
        error = sys.exception()
        if error is None or ends_recomputation(error) or not _comes_out_of(model, error):
            return
        failed = f"raised {type(error).__name__}: {_first_line(error)}"
        if isinstance(error, TransferError):  # The others hear it by the connection, too.
            self._publish(failed)
            self._abort_communicator()
        elif not self._all_have_failed(failed):
            error.add_note(
                f"other ranks of {list(self._group.ranks)} are in the middle of this pass, and end with this error, "
                f"too. Their process group can't be used any more: {recovery_hint()}"
            )

    def _begin_backward(self) -> None:
        if self._backward != graph_task_id():
            self._backward = graph_task_id()
            register_post_backward(lambda: None, self._on_backward_failed)

    def _on_backward_failed(self) -> None:
        """An error in backward, which autograd raises to the caller only: tells the other ranks of it."""
        self._is_failed = in_autograds_thread()
        if self._is_failed:
            return  # The next call tells the others.
        if not any(str(event).startswith(LOST_EVENT) for event in self._recorder.events):
            self._all_have_failed("its backward pass failed, with an error that is raised there")

    def _all_have_failed(self, what: str) -> bool:
        """Reports the failure of this rank, and ends the connections unless all ranks have failed in this pass."""
        self._publish(what)
        try:
            exchange(_RECORD, self._group, limit_seconds=_GRACE_SECONDS)
        except TransferError:
            self._recorder.publish()
            self._abort_communicator()
            return False
        self._recorder.events.clear()
        self._recorder.publish(goes_on=True)
        return True

    def _abort_communicator(self) -> None:
        abort = self._group.state.get_or_create(PassRecorder).abort
        if abort is not None:
            abort.abort_on_all_ranks()

    def _publish(self, what: str) -> None:
        self._recorder.events.append(what)
        self._recorder.publish(goes_on=True)


def _comes_out_of(model: nn.Module, error: BaseException) -> bool:
    """Whether the error is one of this model's pass, and not one that is handled around it."""
    return any(frame.f_locals.get("self") is model for frame, _ in traceback.walk_tb(error.__traceback__))


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300]


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
