"""A torch optimizer that steps on the tensors, gradients and state that each call gives it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class InnerOptimizer:
    """A torch optimizer without parameters, state and hooks of its own: many calls are one step of the user's."""

    def __init__(self, optim_cls: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._optim_cls, self._settings = optim_cls, dict(settings)
        self._optimizer = self._build([torch.zeros(1, 1)], {})  # Muon takes only matrices.
        self._state_from_init = bool(self._optimizer.state)

    @property
    def defaults(self) -> dict[str, Any]:
        """Options of a group that sets none."""
        return dict(self._optimizer.defaults)

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        """Updates leaf tensors and their states in place; an empty state is filled."""
        for param, grad in zip(params, grads, strict=True):
            if param.grad is not grad:
                param.grad = grad
        states_of = dict(zip(params, states, strict=True))
        if self._state_from_init:
            self._init_state([param for param, state in states_of.items() if not state], states_of, options)
        self._optimizer.param_groups = [{**options, "params": list(params)}]
        self._optimizer.state = defaultdict(dict, states_of)
        _step_without_hooks(self._optimizer)
        self._optimizer.param_groups, self._optimizer.state = [], defaultdict(dict)

    def _init_state(
        self, new: list[Tensor], states: Mapping[Tensor, dict[str, Any]], options: Mapping[str, Any]
    ) -> None:
        """Makes the state that a constructor makes, as Adagrad's does; others make it in their first step."""
        if new:
            made = self._build(new, options).state
            for param in new:
                states[param].update(made[param])

    def fill_options(self, groups: list[dict[str, Any]]) -> None:
        """Gives loaded groups the options that older versions of the optimizer did not save."""
        self._optimizer.__setstate__({"state": defaultdict(dict), "param_groups": groups})
        self._optimizer.param_groups = []

    def _build(self, params: list[Tensor], options: Mapping[str, Any]) -> Optimizer:
        return self._optim_cls([{**options, "params": params}], **self._settings)


def _step_without_hooks(optimizer: Optimizer) -> None:
    """One step without hooks: they belong to the user's optimizer, of which it is a part of a step."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)
