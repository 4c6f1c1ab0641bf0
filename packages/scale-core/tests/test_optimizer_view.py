"""torch's functions for state see which elements a shard's state has; nobody else sees any difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sharded_by_hand import Model, cut, train
from test_holdings import Flat
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from scale_core.boxes import LocalShard
from scale_core.optimizer_view import asked_by_torch, view, view_all
from scale_core.shard import shard_of


def stepped(model: nn.Module, *, by: Any = torch.optim.Adam) -> Optimizer:
    view_all()
    optimizer: Optimizer = by([param for param in model.parameters() if param.requires_grad], lr=0.01)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    return optimizer


def test_torch_s_functions_get_the_range_of_each_tensor_and_others_the_tensors() -> None:
    model = cut(Model(), 1, 3)
    optimizer = stepped(model)
    state: dict[str, Any] = get_optimizer_state_dict(model, optimizer)["state"]
    for name, param in model.named_parameters():
        shard = shard_of(param)
        if param.requires_grad and shard is not None:
            labelled = state[name]["exp_avg"]
            assert isinstance(labelled, LocalShard)
            assert (tuple(labelled.shape), labelled.start, labelled.stop) == (shard.shape, shard.start, shard.stop)
            assert labelled.tensor.is_set_to(optimizer.state[param]["exp_avg"])
            assert not isinstance(state[name]["step"], LocalShard)
    assert not any(
        isinstance(value, LocalShard) for slots in optimizer.state_dict()["state"].values() for value in slots.values()
    )


def test_it_loads_its_own_shards_and_cuts_whole_tensors() -> None:
    plain = Model()
    whole = get_optimizer_state_dict(plain, stepped(plain))
    model = cut(Model(), 1, 3)
    optimizer, fresh = stepped(model), torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.5)
    set_optimizer_state_dict(model, fresh, whole)
    for param, slots in optimizer.state.items():
        assert all(torch.equal(value, fresh.state[param][key]) for key, value in slots.items())
    shards = get_optimizer_state_dict(model, optimizer)
    train(model, fresh, 1)
    fresh.zero_grad()
    set_optimizer_state_dict(model, fresh, shards)
    for param, slots in optimizer.state.items():
        assert all(torch.equal(value, fresh.state[param][key]) for key, value in slots.items())


def test_the_given_state_is_not_changed() -> None:
    model = cut(Model(), 1, 3)
    optimizer = stepped(model)
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(())
    given = {"state": dict(state["state"]), "param_groups": list(state["param_groups"])}
    optimizer.load_state_dict(given)
    assert given["state"][0]["exp_avg"] is state["state"][0]["exp_avg"]


def test_the_range_of_another_rank_is_refused() -> None:
    first, second = cut(Model(), 0, 2), cut(Model(), 1, 2)
    states = [get_optimizer_state_dict(model, stepped(model)) for model in (first, second)]
    optimizer = stepped(first)
    with pytest.raises(
        ValueError, match=r"optimizer state .*: expected the elements \[0, .*torch.distributed.checkpoint"
    ):
        set_optimizer_state_dict(first, optimizer, states[1])


def test_flat_parameters_are_refused_with_what_to_call() -> None:
    view_all()
    model = Flat(nn.Linear(3, 2))
    optimizer = torch.optim.Adam([model.flat_param_0])
    model.flat_param_0.grad = torch.ones_like(model.flat_param_0)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == model.flat_param_0.shape
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[model.flat_param_0]["exp_avg"].shape == model.flat_param_0.shape
    with pytest.raises(
        RuntimeError, match=r"'flat_param' is a flat parameter, .*gather_full_optim_state_dict\(optimizer"
    ):
        get_optimizer_state_dict(model, optimizer)


def test_one_that_has_not_stepped_can_be_shown_and_gets_its_hooks_once() -> None:
    model = cut(Model(), 1, 3)
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad])
    for _ in range(2):
        view(optimizer)
    assert len(optimizer._optimizer_state_dict_post_hooks) == len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_one_on_whole_parameters_gets_none_until_it_is_given_a_shard() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    view(optimizer)
    assert not optimizer._optimizer_state_dict_post_hooks
    optimizer.add_param_group({"params": [next(cut(Model(), 0, 2).parameters())]})
    view(optimizer)
    assert optimizer._optimizer_state_dict_post_hooks
    view("no optimizer")


def test_what_is_no_state_of_a_shard_is_refused_where_torch_asks() -> None:
    model = cut(nn.Sequential(nn.Linear(4, 4, bias=False)), 0, 2)
    optimizer = torch.optim.Adam(model.parameters())
    view(optimizer)
    (param,) = model.parameters()
    optimizer.state[param]["rows"] = torch.ones(3)
    with pytest.raises(
        RuntimeError, match=r"optimizer state 0.weight.rows has shape \(3,\), expected the shard's \(8,\)"
    ):
        get_optimizer_state_dict(model, optimizer)


def test_nobody_here_is_torch() -> None:
    assert asked_by_torch() is None
