"""torch's functions for state see which elements a shard's state has; a state for others says whose part it is."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rank_values import by_rank
from sharded_by_hand import Model, cut, train
from test_param_ownership import Flat
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from scale_core.comm.group import Group, group_of
from scale_core.shard import Axis, Placement, Shard, on_local_tensors, register_stages, shard_of
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.state.local_shard import LocalShard
from scale_core.state.torch_state_dict import SHARDS, install_hooks, torch_request


def stepped(model: nn.Module, *, by: Any = torch.optim.Adam) -> Optimizer:
    optimizer: Optimizer = by([param for param in model.parameters() if param.requires_grad], lr=0.01)
    train(model, optimizer, 2)
    optimizer.zero_grad()
    return optimizer


def test_torchs_functions_get_ranges_and_others_tensors() -> None:
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
    model = Flat(nn.Linear(3, 2))
    optimizer = torch.optim.Adam([model.flat_param_0])
    model.flat_param_0.grad = torch.ones_like(model.flat_param_0)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["exp_avg"].shape == model.flat_param_0.shape
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.state[model.flat_param_0]["exp_avg"].shape == model.flat_param_0.shape
    with pytest.raises(
        RuntimeError, match=r"'flat_param' is a flat parameter, .*full_optim_state_dict\(model, optimizer"
    ):
        get_optimizer_state_dict(model, optimizer)


def test_an_optimizer_before_its_first_step_gets_hooks_once() -> None:
    model = cut(Model(), 1, 3)
    optimizer = torch.optim.Adam([param for param in model.parameters() if param.requires_grad])
    for _ in range(2):
        install_hooks(optimizer)
    assert len(optimizer._optimizer_state_dict_post_hooks) == len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


def test_an_optimizer_of_full_parameters_gets_hooks_with_a_shard() -> None:
    optimizer = torch.optim.Adam(nn.Linear(2, 2).parameters())
    install_hooks(optimizer)
    assert not optimizer._optimizer_state_dict_post_hooks
    optimizer.add_param_group({"params": [next(cut(Model(), 0, 2).parameters())]})
    install_hooks(optimizer)
    assert optimizer._optimizer_state_dict_post_hooks
    install_hooks("no optimizer")


def test_an_optimizer_whose_parameters_become_shards_gets_hooks() -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.ones(2))])
    install_hooks(optimizer)
    optimizer.param_groups[0]["params"] = [next(cut(Model(), 0, 2).parameters())]
    install_hooks(optimizer)
    assert SHARDS in optimizer.state_dict() and optimizer._optimizer_load_state_dict_pre_hooks


def test_what_is_no_state_of_a_shard_is_refused_where_torch_asks() -> None:
    model = cut(nn.Sequential(nn.Linear(4, 4, bias=False)), 0, 2)
    optimizer = torch.optim.Adam(model.parameters())
    install_hooks(optimizer)
    (param,) = model.parameters()
    optimizer.state[param]["rows"] = torch.ones(3)
    with pytest.raises(ValueError, match=r"state 0.weight.rows has shape \(3,\), expected the shard's \(8,\)"):
        get_optimizer_state_dict(model, optimizer)


def test_nobody_here_is_torch() -> None:
    assert torch_request() is None


def saved_and_read(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    read: dict[str, Any] = torch.load(file, weights_only=True)
    return read


def test_a_state_says_whose_part_it_is_and_loads_there() -> None:
    model = cut(Model(), 1, 3)
    optimizer = stepped(model)
    state = saved_and_read(copy.deepcopy(optimizer.state_dict()))
    assert (state["shards"]["rank"], state["shards"]["world_size"]) == (0, 1)
    assert state["shards"]["held"][0] == ("scale", (), 0, 0, ())
    fresh = torch.optim.Adam([param for param in model.parameters() if param.requires_grad])
    for by in (optimizer, fresh):
        by.load_state_dict(state)
        assert "shards" not in by.state
        for param, slots in optimizer.state.items():
            assert all(torch.equal(value, by.state[param][key]) for key, value in slots.items())
    assert "shards" not in stepped(Model()).state_dict()


def test_a_part_of_another_rank_is_refused_before_a_step_too() -> None:
    def trained(rank: int, size: int) -> list[nn.Parameter]:
        return [param for param in cut(Model(), rank, size).parameters() if param.requires_grad]

    state = stepped(cut(Model(), 0, 2)).state_dict()
    plain = [param for param in Model().parameters() if param.requires_grad]
    for params in (trained(1, 2), trained(0, 3), plain):
        optimizer = torch.optim.Adam(params)
        with pytest.raises(ValueError, match=r"is the shard of rank 0 of 1, .* '.*'.*full_optim_state_dict"):
            optimizer.load_state_dict(state)
        assert not optimizer.state
    # One rank has had all of it: each takes its own elements.
    whole = stepped(cut(Model(), 0, 1)).state_dict()
    for params, expected in ((trained(1, 2), stepped(cut(Model(), 1, 2))), (plain, stepped(Model()))):
        optimizer = torch.optim.Adam(params)
        optimizer.load_state_dict(whole)
        for param, slots in zip(params, expected.state.values(), strict=True):
            assert all(torch.equal(value, optimizer.state[param][key]) for key, value in slots.items())
    state = {key: value for key, value in state.items() if key != "shards"}  # As others may have kept it.
    with pytest.raises(ValueError, match=r"expected the full .* or this rank's shard .*, got"):
        torch.optim.Adam(trained(0, 3)).load_state_dict(state)


@pytest.mark.ranks(2)
@on_local_tensors
def test_a_part_that_fits_one_rank_alone_is_refused_on_all() -> None:
    group = group_of()
    param = nn.Parameter(torch.ones(2))
    set_shard(param, Shard("weight", (4,), 2 * group.rank, 2 * group.rank + 2, (Axis(group, Placement.SHARD),)))
    optimizer = torch.optim.Adam([param])
    param.grad = torch.full((2,), float(group.rank))
    optimizer.step()
    states: list[Any] = [None, None]
    dist.all_gather_object(states, optimizer.state_dict())
    fresh = torch.optim.Adam([param])
    fresh.load_state_dict(states[group.rank])
    assert torch.equal(fresh.state[param]["exp_avg"], optimizer.state[param]["exp_avg"])
    with pytest.raises(ValueError, match=r"this optimizer state is the shard of rank 0 of 2") as error:
        fresh.load_state_dict(states[0])
    fits, differs = by_rank(str(error.value))
    assert "It fits this rank, but not all others" in fits
    assert "it has [0, 2) of 'weight' (4,), and in its place here is [2, 4) of (4,)" in differs


class Stage(nn.Module):
    """A pipeline of two ranks, as one of them sees it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.group, self.layers = Group(rank, 2, ranks=(0, 1)), nn.ModuleDict({str(rank): nn.Linear(2, 2)})

    def counted_elsewhere(self) -> set[Tensor]:
        return set()


def test_the_state_of_one_stage_is_not_that_of_another() -> None:
    models = [Stage(rank) for rank in range(2)]
    for model in models:
        register_stages(model)
    first, second = (torch.optim.Adam(model.parameters()) for model in models)
    first.load_state_dict(first.state_dict())
    with pytest.raises(
        ValueError, match=r"'layers.0.weight' \(2, 2\), and in its place here is 'layers.1.weight', all"
    ):
        second.load_state_dict(first.state_dict())
