"""Hooks around an optimizer's step see full parameters, once in each step, whatever has wrapped the step."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from scale_fsdp import fully_shard


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.ranks(2, in_turn=True)
def test_hooks_see_full_tensors_once_in_each_step(scheduled: bool) -> None:
    """Each call of a hook, and what it sees of a weight, of its gradient and of its state."""
    two, three = "[[3, 5], [3, 5]]", "[[3, 5], [3, 5], [3, 5]]"
    first = ["wrapper", f"everywhere {two}", f"before {two}", f"after {three}"]
    later = ["wrapper", f"everywhere {three}", f"before {three}", f"after {three}"]
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(5, 3, bias=False).double())
    optimizer = Adam(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.5) if scheduled else None  # It wraps the step.
    wrapped = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:  # As Accelerate wraps it again.
        seen.append("wrapper")
        return wrapped(*args, **kwargs)

    optimizer.step = functools.wraps(wrapped)(step) if scheduled else step  # type: ignore[method-assign]
    seen: list[str] = []

    def note(name: str) -> Any:
        def hook(optimizer: Optimizer, *_: object) -> None:
            weight = model.weight
            state = optimizer.state[weight].get("exp_avg") if optimizer.state else None
            shapes = [list(each.shape) for each in (weight, weight.grad, state) if isinstance(each, torch.Tensor)]
            seen.append(f"{name} {shapes}")

        return hook

    everywhere = register_optimizer_step_pre_hook(note("everywhere"))
    optimizer.register_step_pre_hook(note("before"))
    optimizer.register_step_post_hook(note("after"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            model(torch.ones(2, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
    everywhere.remove()
    assert seen == [*first, *later, *later]


@pytest.mark.ranks(2)
def test_a_copy_of_the_state_lacks_what_comes_later() -> None:
    model = fully_shard(nn.Linear(2, 4))
    optimizer = Adam(model.parameters())
    copies = copy.copy(optimizer.state), optimizer.state.copy()  # type: ignore[attr-defined]  # a dict to torch's types
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert [len(state) for state in (*copies, optimizer.state)] == [0, 0, 2]
