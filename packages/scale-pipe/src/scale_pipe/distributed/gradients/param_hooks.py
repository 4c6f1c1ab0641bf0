"""Hooks that users put on parameters of stages by `register_post_accumulate_grad_hook`.

Autograd would call them in each micro-batch, with a part of the gradient. An optimizer that steps in such a hook would
train on parts, and change weights that other micro-batches are in the middle of. So the hooks are taken off while a
step runs, and called once, with the gradient that plain PyTorch gives them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.hooks.autograd import is_own_hook
from scale_core.hooks.gradients import lacks_autograd_hooks
from scale_pipe.distributed.runtime import StepInputs


@dataclass(eq=False)
class _HookedParam:
    """A parameter, its hooks by number, and its gradient before the step."""

    param: nn.Parameter
    stages: set[int]
    hooks: dict[int, Callable[..., Any]]
    grad: Tensor | None
    version: int

    @classmethod
    def take_hooks(cls, param: nn.Parameter) -> _HookedParam | None:
        """Takes the users' hooks off a parameter; None where it has none that autograd calls."""
        registered: dict[int, Callable[..., Any]] = getattr(param, "_post_accumulate_grad_hooks", None) or {}
        hooks = {number: hook for number, hook in registered.items() if not is_own_hook(hook)}
        if not hooks or lacks_autograd_hooks(param):
            return None
        for number in hooks:
            del registered[number]
        return cls(param, set(), hooks, param.grad, -1 if param.grad is None else param.grad._version)

    @property
    def has_new_grad(self) -> bool:
        """Whether the step has changed its gradient."""
        grad = self.param.grad
        return grad is not None and (grad is not self.grad or grad._version != self.version)

    def restore_hooks(self) -> None:
        registered: Any = self.param._post_accumulate_grad_hooks
        registered.update(self.hooks)


class ParamHooks:
    """The users' hooks on the parameters of one rank's stages, which are taken off for one step."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        hooked: dict[nn.Parameter, _HookedParam | None] = {}
        for number, stage in stages.items():
            for param in stage.parameters():
                if param not in hooked:
                    hooked[param] = _HookedParam.take_hooks(param)
                if (entry := hooked[param]) is not None:
                    entry.stages.add(number)
        self._waiting = [entry for entry in hooked.values() if entry is not None]

    @torch.no_grad()
    def call(self, stage: int | None = None) -> None:
        """Calls the hooks of a stage whose gradients are complete, None is all stages, and puts them back."""
        ready = [entry for entry in self._waiting if stage is None or entry.stages == {stage}]
        self._waiting = [entry for entry in self._waiting if entry not in ready]
        for entry in ready:
            entry.restore_hooks()
        for entry in ready:
            for hook in entry.hooks.values() if entry.has_new_grad else ():
                hook(entry.param)

    def restore(self) -> None:
        """Puts back the hooks that were not called."""
        for entry in self._waiting:
            entry.restore_hooks()
        self._waiting = []


@contextmanager
def hooks_called_once(stages: Mapping[int, nn.Module], inputs: StepInputs) -> Iterator[StepInputs]:
    """Around a step: its hooks are called when it has gone well, or before the optimizer of `inputs` steps a stage."""
    hooks, step_stage = ParamHooks(stages), inputs.step_optimizer

    def call_and_step(stage: int) -> Sequence[int]:
        assert step_stage is not None
        hooks.call(stage)
        return step_stage(stage)

    try:
        yield inputs if step_stage is None else inputs._replace(step_optimizer=call_and_step)
        hooks.call()
    finally:
        hooks.restore()
