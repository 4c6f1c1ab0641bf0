"""An optimizer's state goes by the names of parameters, also where one flat parameter holds several of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from sharded_by_hand import Model, cut, train
from test_param_ownership import Flat
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.shard import on_local_tensors
from scale_core.state.optim_state_dict import entries_from, optimizer_targets, owners_of, state_entries
from scale_core.state.param_groups import saved_groups
from scale_core.state.state_dict import LocalShard, load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_core.state.validation import SavedTensor, StateMismatch

WORLD = 3


class Trained(nn.Module):
    """The trained parameters of the model alone, so that flat and not flat have the same."""

    def __init__(self) -> None:
        super().__init__()
        for name, param in Model().named_parameters():
            if param.requires_grad:
                self.register_parameter(name.replace(".", "_"), nn.Parameter(param.detach().clone()))


@on_local_tensors
def made(model: nn.Module, steps: int = 0) -> tuple[nn.Module, Optimizer]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(steps):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1 * (step + 1))
        optimizer.step()
    return model, optimizer


@on_local_tensors
def whole(states: list[dict[str, Any]]) -> dict[str, Any]:
    """What the states of all ranks are together."""
    return {
        key: torch.cat([state[key].tensor.reshape(-1) for state in states]).view(value.shape)
        if isinstance(value, LocalShard)
        else value
        for key, value in states[0].items()
    }


@on_local_tensors
def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        assert torch.equal(value, theirs[key]) if isinstance(value, Tensor) else value == theirs[key], key


@on_local_tensors
def test_a_flat_parameter_has_states_under_the_names_it_holds() -> None:
    plain = sharded_state_dict(*made(Trained(), 3))
    ranks = [sharded_state_dict(*made(Flat(Trained(), rank, WORLD), 3)) for rank in range(WORLD)]
    assert_same(whole(ranks), plain)
    assert saved_groups(ranks[0])[0].names == tuple(name for name, _ in Trained().named_parameters())


@pytest.mark.parametrize("copied", [True, False])
@on_local_tensors
def test_whole_tensors_load_into_a_flat_parameter_and_out_of_it(copied: bool) -> None:
    plain = sharded_state_dict(*made(Trained(), 3))
    for rank in range(WORLD):
        flat = made(Flat(nn.ModuleDict({"a": Trained()})["a"], rank, WORLD))
        load_sharded_state_dict(plain, *flat, copy=copied)
        assert_same_shards(sharded_state_dict(*flat), sharded_state_dict(*made(Flat(Trained(), rank, WORLD), 3)))
        by_hand = cut(Trained(), rank, WORLD)
        by_hand_pair = made(by_hand)
        load_sharded_state_dict(plain, *by_hand_pair, copy=copied)
        assert_same_shards(sharded_state_dict(*by_hand_pair), sharded_state_dict(*made(cut(Trained(), rank, WORLD), 3)))


@on_local_tensors
def assert_same_shards(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    def local(state: dict[str, Any]) -> dict[str, Any]:
        return {key: value.tensor if isinstance(value, LocalShard) else value for key, value in state.items()}

    assert_same(local(ours), local(theirs))


@on_local_tensors
def test_a_fresh_flat_optimizer_has_a_tensor_for_each_state() -> None:
    plain = sharded_state_dict(*made(Trained(), 2))
    saved = {
        key: SavedTensor(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for key, value in plain.items()
    }
    model, optimizer = made(Flat(Trained(), 1, WORLD))
    target = target_state_dict(model, optimizer, saved)
    shards = [target[key] for key in plain if key.endswith(".exp_avg")]
    assert all(isinstance(shard, LocalShard) for shard in shards)
    assert len({shard.tensor.untyped_storage().data_ptr() for shard in shards}) == 1
    for key, value in target.items():
        if isinstance(value, LocalShard):
            value.tensor.view(-1).copy_(plain[key].reshape(-1)[value.start : value.stop])
        elif isinstance(value, Tensor):
            value.copy_(plain[key])
    load_sharded_state_dict(target, model, optimizer, copy=False)
    expected = sharded_state_dict(*made(Flat(Trained(), 1, WORLD), 2))
    assert_same_shards(sharded_state_dict(model, optimizer), expected)
    state = optimizer.state[model.flat_param_0]["exp_avg"]
    # What lies between its parts is never read, but must be no NaN that a norm or a check would find.
    assert torch.equal(state, made(Flat(Trained(), 1, WORLD), 2)[1].state_dict()["state"][0]["exp_avg"].mul(state != 0))


@pytest.mark.parametrize(("capturable", "device"), [(False, "cpu"), (True, "meta")])
@on_local_tensors
def test_a_new_count_is_where_torch_keeps_it(capturable: bool, device: str) -> None:
    saved = {
        key: SavedTensor(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for key, value in sharded_state_dict(*made(nn.Linear(2, 2), 1)).items()
    }
    model = nn.Linear(2, 2, device="meta")  # Any device but the host's.
    optimizer = torch.optim.Adam(model.parameters(), capturable=capturable)
    target = optimizer_targets(model, [optimizer], saved, lambda name: name)
    assert target["optim.weight.step"].device.type == device
    assert target["optim.weight.exp_avg"].device.type == "meta"


@on_local_tensors
def test_live_state_is_kept_where_its_own_views_come_back() -> None:
    model, optimizer = made(Flat(Trained(), 1, WORLD), 2)
    live = optimizer.state[model.flat_param_0]["exp_avg"]
    load_sharded_state_dict(sharded_state_dict(model, optimizer), model, optimizer, copy=False)
    assert optimizer.state[model.flat_param_0]["exp_avg"] is live


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda state: state.update({"optim.head_bias.step": torch.tensor(7.0)}),
            r"optim.head_bias.step is 7.0 and optim.scale.step is 2.0, but one flat parameter holds both: load",
        ),
        (
            lambda state: state.pop("optim.head_bias.exp_avg"),
            r"optim.head_bias.exp_avg is missing in the state, but scale has one, and one flat parameter holds both",
        ),
        (
            lambda state: [state.pop(f"optim.scale.{key}") for key in ("step", "exp_avg", "exp_avg_sq")],
            r"optim.scale.step is missing in the state, but nothing has one",
        ),
    ],
)
@on_local_tensors
def test_what_a_flat_parameter_shares_must_be_alike(change: Any, message: str) -> None:
    state = dict(sharded_state_dict(*made(Trained(), 2)))
    change(state)
    model, optimizer = made(Flat(Trained(), 0, 2))
    before = model.flat_param_0.detach().clone()
    with pytest.raises(StateMismatch, match=message):
        load_sharded_state_dict(state, model, optimizer)
    assert torch.equal(model.flat_param_0, before) and not optimizer.state


@on_local_tensors
def test_names_of_parameters_of_an_optimizer_are_not_saved() -> None:
    model = Trained()
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.01)
    state = copy.deepcopy(sharded_state_dict(model, optimizer))
    assert "param_names" not in saved_groups(state)[0].options
    names = list(optimizer.param_groups[0]["param_names"])
    load_sharded_state_dict(state, model, optimizer)
    assert optimizer.param_groups[0]["param_names"] == names


@on_local_tensors
def test_owners_come_in_the_optimizer_s_order() -> None:
    model = cut(Model(), 0, 2)
    params = [param for param in reversed(list(model.parameters())) if param.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    assert list(map(id, owners_of(model, optimizer))) == list(map(id, params))
    train(model, optimizer, 1)
    (found,) = state_entries(sharded_state_dict(model, optimizer), model, [optimizer], lambda name: name)
    assert all(found.slots[p]["momentum_buffer"].is_set_to(optimizer.state[p]["momentum_buffer"]) for p in params)


@on_local_tensors
def test_what_a_whole_parameter_keeps_may_have_any_shape() -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.Adafactor(model.parameters())
    model.weight.grad = torch.ones(4, 4)
    optimizer.step()
    fresh = nn.Linear(4, 4, bias=False)
    into = torch.optim.Adafactor(fresh.parameters())
    load_sharded_state_dict(sharded_state_dict(model, optimizer), fresh, into)
    assert into.state[fresh.weight]["row_var"].shape == (4, 1)
    assert entries_from({}, owners_of(fresh, into), into.state) == {}
