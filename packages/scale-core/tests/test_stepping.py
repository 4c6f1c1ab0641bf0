"""stepping.py: an optimizer steps on the model's own parameters, on whole gradients, and leaves a trace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from scale_core.group import Group
from scale_core.shard import Axis, Held, Shard, mark
from scale_core.stepping import mark_replaced, refuse_steps, watch_optimizers


@pytest.fixture(autouse=True)
def _watched() -> None:
    watch_optimizers()


class Owner:
    """What `refuse_steps` looks at."""

    def __init__(self, *params: nn.Parameter) -> None:
        self.exposed, self.names, self.has_gradient = list(params), ["layer.weight", "layer.bias"], False


def with_grad(size: int = 2) -> nn.Parameter:
    param = nn.Parameter(torch.ones(size))
    param.grad = torch.ones(size)
    return param


def as_shard(param: nn.Parameter) -> nn.Parameter:
    mark(param, Shard("weight", (param.numel(),), 0, param.numel(), (Axis(Group(), Held.SHARD),)))
    return param


def test_a_step_on_replaced_parameters_is_refused_by_name_and_changes_nothing() -> None:
    param, owner = with_grad(), Owner()
    optimizer = torch.optim.SGD([with_grad(), param], lr=1.0)
    mark_replaced(param, owner, 1)
    owner.names[1] = "block.layer.bias"  # As a module around it is sharded later.
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"SGD was built before.*'block.layer.bias'.*SGD\(model.parameters\(\)"):
            optimizer.step()
    assert param.tolist() == [1, 1] and optimizer.param_groups[0]["params"][0].tolist() == [1, 1]


def test_a_group_that_is_added_between_two_steps_is_looked_at_too() -> None:
    replaced = with_grad()
    mark_replaced(replaced, Owner(), 0)
    optimizer = torch.optim.SGD([with_grad()], lr=1.0)
    optimizer.step()
    optimizer.add_param_group({"params": [replaced]})
    with pytest.raises(RuntimeError, match=r"'layer.weight' is not the model's"):
        optimizer.step()


def test_an_optimizer_that_has_stepped_before_its_parameters_were_replaced_is_refused() -> None:
    param = with_grad()
    optimizer = torch.optim.SGD([param], lr=1.0)
    optimizer.step()
    mark_replaced(param, Owner(), 0)
    with pytest.raises(RuntimeError, match=r"'layer.weight' is not the model's"):
        optimizer.step()


def test_gradients_that_wait_refuse_the_steps_of_their_own_parameters_only() -> None:
    mine, other = with_grad(), with_grad()
    owner = Owner(mine)
    refuse_steps(owner)
    optimizer = torch.optim.Adam([mine], lr=1.0)
    optimizer.step()
    owner.has_gradient = True
    with pytest.raises(RuntimeError, match=r"Adam.step\(\): gradients of 'layer.weight'.*no_sync.*model.zero_grad"):
        optimizer.step()
    torch.optim.Adam([other], lr=1.0).step()
    owner.has_gradient = False
    optimizer.step()


def test_an_owner_that_is_gone_refuses_nothing() -> None:
    param = with_grad()
    owner = Owner(param)
    owner.has_gradient = True
    refuse_steps(owner)
    del owner
    torch.optim.SGD([param], lr=1.0).step()


@pytest.mark.parametrize("fused", [True, False])
def test_every_step_on_a_shard_counts_as_a_new_version_also_of_what_it_is_a_view_of(fused: bool) -> None:
    flat: Tensor = torch.ones(4)
    piece = as_shard(nn.Parameter(flat[:2]))
    piece.grad = torch.ones(2)
    before = flat._version
    torch.optim.Adam([piece], lr=1.0, fused=fused).step()
    assert flat._version > before
    assert piece._version == flat._version


def test_watching_twice_is_watching_once() -> None:
    piece = as_shard(with_grad())
    watch_optimizers()
    optimizer = torch.optim.SGD([piece], lr=1.0, fused=True)
    before = piece._version
    optimizer.step()
    assert piece._version == before + 1
