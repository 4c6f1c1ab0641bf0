"""host_kernel.py: a torch optimizer that steps on what it is given and keeps nothing."""

from __future__ import annotations

from typing import Any

import offload_cases as cases
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scale_fsdp.offload.host_kernel import InnerOptimizer


@pytest.mark.parametrize("name", cases.ELEMENTWISE)
def test_it_is_the_optimizer_whose_state_it_is_given(name: str) -> None:
    kind, settings = cases.ELEMENTWISE[name]
    start = torch.linspace(-1, 1, 70)
    plain, own = nn.Parameter(start.clone()), start.clone()
    optimizer, bare = kind([plain], **settings), InnerOptimizer(kind, settings)
    state: dict[str, Any] = {}
    for step in range(3):
        plain.grad = torch.full((70,), 0.5 * step) + start
        optimizer.step()
        bare.step([own], [plain.grad.clone()], [state], bare.defaults)
    assert torch.equal(own, plain)
    theirs = optimizer.state_dict()["state"].get(0, {})
    assert state.keys() == theirs.keys() and all(torch.equal(state[key], theirs[key]) for key in state)


def test_new_and_old_tensors_go_together_and_nothing_is_kept() -> None:
    bare = InnerOptimizer(torch.optim.Adam, {"lr": 0.1})
    states: list[dict[str, Any]] = [{}, {}]
    params = [torch.ones(3), torch.ones(2, 2)]
    grads = [torch.ones(3), torch.ones(2, 2)]
    bare.step(params[:1], grads[:1], states[:1], bare.defaults)
    kept = states[0]["exp_avg"]
    bare.step(params, grads, states, bare.defaults)
    assert [state["step"].item() for state in states] == [2, 1] and states[0]["exp_avg"] is kept
    assert not bare._optimizer.state and not bare._optimizer.param_groups


def test_a_constructor_with_state_runs_for_new_tensors_only() -> None:
    built: list[int] = []

    class Counting(torch.optim.Adagrad):
        def __init__(self, params: Any, **settings: Any) -> None:
            super().__init__(params, **settings)
            built.append(sum(len(group["params"]) for group in self.param_groups))

    bare = InnerOptimizer(Counting, {"lr": 0.1})
    params, states = [torch.ones(3), torch.ones(2)], list[dict[str, Any]]([{}, {}])
    built.clear()
    for count in (1, 1, 2, 2):
        bare.step(params[:count], [torch.ones_like(param) for param in params[:count]], states[:count], bare.defaults)
    assert built == [1, 1]
    assert [state["step"].item() for state in states] == [4, 2]


def test_a_group_may_have_its_own_and_unknown_options() -> None:
    bare = InnerOptimizer(torch.optim.SGD, {"lr": 0.1})
    param = torch.ones(2)
    bare.step([param], [torch.ones(2)], [{}], {**bare.defaults, "lr": 0.5, "initial_lr": 0.7, "name": "mine"})
    assert param.tolist() == [0.5, 0.5]


def test_nobody_is_told_of_its_steps() -> None:
    told: list[object] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: told.append(optimizer))
    try:
        bare = InnerOptimizer(torch.optim.SGD, {"lr": 0.1})
        bare.step([torch.ones(2)], [torch.ones(2)], [{}], bare.defaults)
    finally:
        handle.remove()
    assert not told


def test_groups_of_older_versions_are_completed() -> None:
    bare = InnerOptimizer(torch.optim.AdamW, {})
    old = {"params": [], "lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    bare.fill_options([old])
    assert old["amsgrad"] is False and old["decoupled_weight_decay"] is True
