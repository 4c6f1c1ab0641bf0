"""A torch optimizer without what it remembers and without those who watch it.

Where an update is made piece by piece and in two places, each piece comes with its own tensors, gradients and state,
and all of them together are one step of one optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class BareOptimizer:
    """A torch optimizer that keeps nothing: it steps on the tensors, gradients and state that it is given.

    Args:
        optim_cls: Its class.
        settings: Its constructor's arguments, without the parameters.
    """

    def __init__(self, optim_cls: type[Optimizer], settings: Mapping[str, Any]) -> None:
        self._optim_cls, self._settings = optim_cls, dict(settings)
        self._optimizer = self._make([torch.zeros(1, 1)], {})  # Muon takes only matrices.
        self._begins_with_state = bool(self._optimizer.state)

    @property
    def defaults(self) -> dict[str, Any]:
        """The options of a group that sets none."""
        return dict(self._optimizer.defaults)

    def step(
        self,
        params: Sequence[Tensor],
        grads: Sequence[Tensor],
        states: Sequence[dict[str, Any]],
        options: Mapping[str, Any],
    ) -> None:
        """Updates params and states in place.

        Args:
            params: Leaf tensors of any shapes.
            grads: The gradient of each, of its shape and dtype.
            states: What the optimizer remembers of each; filled where it is empty.
            options: Those of a parameter group.
        """
        for param, grad in zip(params, grads, strict=True):
            if param.grad is not grad:
                param.grad = grad
        states_of = dict(zip(params, states, strict=True))
        if self._begins_with_state:
            self._begin([param for param, state in states_of.items() if not state], states_of, options)
        self._optimizer.param_groups = [{**options, "params": list(params)}]
        self._optimizer.state = defaultdict(dict, states_of)
        _step_without_hooks(self._optimizer)
        self._optimizer.param_groups, self._optimizer.state = [], defaultdict(dict)

    def _begin(self, new: list[Tensor], states: Mapping[Tensor, dict[str, Any]], options: Mapping[str, Any]) -> None:
        """Makes the state that a constructor makes, as Adagrad's does; others make it in their first step."""
        if new:
            made = self._make(new, options).state
            for param in new:
                states[param].update(made[param])

    def complete(self, groups: list[dict[str, Any]]) -> None:
        """Gives groups of options that were saved what this class adds to such, and older versions did not have."""
        self._optimizer.__setstate__({"state": defaultdict(dict), "param_groups": groups})
        self._optimizer.param_groups = []

    def _make(self, params: list[Tensor], options: Mapping[str, Any]) -> Optimizer:
        return self._optim_cls([{**options, "params": params}], **self._settings)


def _step_without_hooks(optimizer: Optimizer) -> None:
    """One step, of which nobody is told: to hooks on optimizers, many pieces are one step of the user's optimizer."""
    step = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)
