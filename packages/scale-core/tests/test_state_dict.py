import copy
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from sharded_by_hand import Model, adam, cut, train
from torch import Tensor, nn
from torch.optim import Optimizer

from scale_core.comm.group import Group
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_core.state.param_groups import is_group
from scale_core.state.state_dict import (
    GROUPS,
    LocalShard,
    load_sharded_state_dict,
    saved_groups,
    sharded_state_dict,
    target_state_dict,
)
from scale_core.state.validation import SavedTensor, StateMismatch

pytestmark = pytest.mark.local_tensors

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
    "amsgrad": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "tensor rate": lambda params: torch.optim.Adam(params, lr=torch.tensor(0.01)),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01),
}


def full(state: dict[str, Any], others: list[dict[str, Any]]) -> dict[str, Any]:
    """Puts the shards of several ranks together."""
    whole: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, LocalShard):
            pieces = [other[key].tensor.reshape(-1) for other in [state, *others]]
            whole[key] = torch.cat(pieces).view(value.shape)
        else:
            whole[key] = value
    return whole


def assert_same(first: dict[str, Any], second: dict[str, Any], rtol: float = 0.0) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(value, second[key], rtol=rtol, atol=0.0, msg=key)
        else:
            assert value == second[key], key


def tolerance(optimizer: str) -> float:
    """A fused kernel rounds the last elements of a range, which fill no vector, in another way."""
    return 1e-10 if optimizer.startswith("fused") else 0.0


def model_of(rank: int, size: int, dtype: torch.dtype) -> nn.Module:
    model = Model().to(dtype)
    return model if size == 1 else cut(model, rank, size)


def trained(
    rank: int = 0, size: int = 1, optimizer: str = "adamw", steps: int = 3, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Any]:
    model = model_of(rank, size, dtype)
    made = OPTIMIZERS[optimizer]([param for param in model.parameters() if param.requires_grad])
    train(model, made, steps)
    return model, made


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_shards_of_all_ranks_together_are_the_plain_state(optimizer: str) -> None:
    plain = sharded_state_dict(*trained(optimizer=optimizer, dtype=torch.float64))
    first, *others = [sharded_state_dict(*trained(rank, 3, optimizer, dtype=torch.float64)) for rank in range(3)]
    assert_same(full(first, others), plain, tolerance(optimizer))


def test_names_are_plain_and_a_tied_parameter_stands_once() -> None:
    keys = [key for key in sharded_state_dict(Model()) if key.startswith("model.")]
    assert keys == [
        "model.scale",
        "model.nothing",
        "model.frozen",
        "model.embed.weight",
        "model.inner.0.weight",
        "model.inner.0.bias",
        "model.inner.1.weight",
        "model.inner.1.bias",
        "model.head.bias",
        "model.inner.1.running_mean",
        "model.inner.1.running_var",
        "model.inner.1.num_batches_tracked",
    ]


def test_a_wrapper_around_a_sharded_model_changes_no_name() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = cut(Model(), 0, 2)

    assert sharded_state_dict(Wrapper()).keys() == sharded_state_dict(Model()).keys()


def test_values_that_are_no_tensors_are_ready_for_json() -> None:
    state = sharded_state_dict(*trained(optimizer="tensor rate"))
    values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
    assert json.loads(json.dumps(values)) == values
    (group,) = saved_groups(state)
    assert group.options["lr"] == pytest.approx(0.01)
    assert group.names[:2] == ("scale", "nothing")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("size", [1, 3])
def test_a_plain_state_loads_into_shards_with_a_fresh_optimizer(optimizer: str, size: int) -> None:
    plain = sharded_state_dict(*trained(optimizer=optimizer, dtype=torch.float64))
    expected = copy.deepcopy(plain)
    for rank in range(size):
        model = model_of(rank, size, torch.float64)
        made = OPTIMIZERS[optimizer]([param for param in model.parameters() if param.requires_grad])
        load_sharded_state_dict(plain, model, made)
        reference = trained(rank, size, optimizer, steps=5, dtype=torch.float64)
        train(model, made, 2, first=3)
        assert_equal_states(sharded_state_dict(model, made), sharded_state_dict(*reference), tolerance(optimizer))
    assert_same(plain, expected)


def assert_equal_states(first: dict[str, Any], second: dict[str, Any], rtol: float) -> None:
    def strip(state: dict[str, Any]) -> dict[str, Any]:
        return {key: value.tensor if isinstance(value, LocalShard) else value for key, value in state.items()}

    assert_same(strip(first), strip(second), rtol)


def test_a_loaded_optimizer_shares_no_memory_with_the_state() -> None:
    state = sharded_state_dict(*trained())
    model, optimizer = trained(steps=0)
    load_sharded_state_dict(state, model, optimizer)
    before = state["optim.scale.exp_avg"].clone()
    train(model, optimizer, 1)
    assert torch.equal(state["optim.scale.exp_avg"], before)


def test_groups_get_saved_hyperparameters_in_their_own_types() -> None:
    model = Model()
    optimizer = adam(model)
    train(model, optimizer, 1)
    optimizer.param_groups[1]["lr"] = 0.5
    state = json_round_trip(sharded_state_dict(model, optimizer))
    fresh = Model()
    other = adam(fresh)
    load_sharded_state_dict(state, fresh, other)
    assert [group["lr"] for group in other.param_groups] == [0.01, 0.5]
    assert other.param_groups[0]["betas"] == (0.9, 0.999)


def json_round_trip(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v if isinstance(v, Tensor | LocalShard) else json.loads(json.dumps(v)) for k, v in state.items()}


def test_a_fresh_optimizer_has_room_for_all_that_was_saved() -> None:
    plain = sharded_state_dict(*trained())
    saved = {
        key: SavedTensor(tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
        for key, value in plain.items()
    }
    model = cut(Model(), 1, 3)
    optimizer = OPTIMIZERS["adamw"]([param for param in model.parameters() if param.requires_grad])
    target = target_state_dict(model, optimizer, saved)
    assert target.keys() == plain.keys()
    assert isinstance(target["optim.embed.weight.exp_avg"], LocalShard)
    assert target["optim.embed.weight.step"].shape == ()
    assert not optimizer.state


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model.embed.weight", torch.ones(7, 6), r"model.embed.weight: the saved shape is \(7, 6\), expected \(7, 5\)"),
        ("model.scale", torch.tensor(1), "model.scale: the saved dtype is torch.int64, expected torch.float32"),
        ("model.extra", torch.ones(1), "other model or optimizer .1 unexpected in it: model.extra.: build"),
        ("model.scale", None, "1 missing in it: model.scale"),
        ("optim.unknown.step", torch.tensor(1.0), "1 unexpected in it: optim.unknown.step"),
        (GROUPS, [], "optim.groups: none saved: save the optimizer too"),
        (
            GROUPS,
            [{"params": []}],
            "group 0 of the optimizer has scale, which was saved in none: build the optimizer",
        ),
        ("optim.embed.weight.exp_avg", torch.ones(3), r"the saved shape is \(3,\), expected \(7, 5\)"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_writing(key: str, value: Any, message: str) -> None:
    state = dict(sharded_state_dict(*trained()))
    if key == GROUPS:  # As older snapshots have them.
        state = {name: each for name, each in state.items() if not is_group(name)}
    if value is None:
        del state[key]
    else:
        state[key] = value
    model = cut(Model(), 0, 2)
    optimizer = OPTIMIZERS["adamw"]([param for param in model.parameters() if param.requires_grad])
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(StateMismatch, match=message):
        load_sharded_state_dict(state, model, optimizer)
    assert all(torch.equal(param, before[name]) for name, param in model.named_parameters())
    assert not optimizer.state


def test_all_differences_are_listed_and_what_fits_is_loaded() -> None:
    state: dict[str, Any] = dict(sharded_state_dict(*trained()))
    del state["model.scale"]
    state |= {
        "model.extra": torch.ones(1),
        "model.embed.weight": torch.ones(7, 6),
        "optim.embed.weight.exp_avg": torch.ones(7, 6),
        "optim.unknown.step": torch.tensor(1.0),
    }
    model = cut(Model(), 0, 2)
    optimizer = OPTIMIZERS["adamw"]([param for param in model.parameters() if param.requires_grad])
    before = {name: param.clone() for name, param in model.named_parameters()}
    with pytest.raises(StateMismatch) as caught:
        load_sharded_state_dict(state, model, optimizer)
    assert str(caught.value) == (
        "the state belongs to another model or optimizer (1 missing in it: model.scale; 2 unexpected in it: "
        "model.extra, optim.unknown.step; 2 of another shape: model.embed.weight: the saved shape is (7, 6), expected "
        "(7, 5), optim.embed.weight.exp_avg: the saved shape is (7, 6), expected (7, 5)): build model and optimizer as "
        "they were, or load what fits with strict=False"
    )
    with pytest.warns(UserWarning, match=r"loaded in part, as strict=False says: 1 missing in it: model\.scale; 2 un"):
        load_sharded_state_dict(state, model, optimizer, strict=False)
    expected = cut(trained()[0], 0, 2)
    left = {"scale", "embed.weight"}
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name] if name in left else expected.get_parameter(name)), name
    # Also of `scale` the state is left out: it goes with its parameter.
    has_state = {name for name, param in model.named_parameters() if param in optimizer.state}
    assert has_state == {name for name, _ in model.named_parameters() if f"optim.{name}.step" in state} - left


def test_the_state_of_another_kind_of_optimizer_is_left_out() -> None:
    state = sharded_state_dict(*trained(optimizer="momentum"))
    model, optimizer = trained(optimizer="adamw", steps=0)
    with pytest.warns(UserWarning, match="the option 'dampening', which this one does not know"):
        load_sharded_state_dict(state, model, optimizer, strict=False)
    assert not optimizer.state and "dampening" not in optimizer.param_groups[0]
    assert torch.equal(model.scale, trained(optimizer="momentum")[0].scale)


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    state = sharded_state_dict(*trained(optimizer="momentum"))
    model, optimizer = trained(optimizer="adamw", steps=0)
    with pytest.raises(StateMismatch, match=r"the option 'dampening', which this one does not know, and no 'ams"):
        load_sharded_state_dict(state, model, optimizer)


def test_the_shards_of_another_rank_are_refused() -> None:
    state = sharded_state_dict(cut(Model(), 1, 2))
    with pytest.raises(StateMismatch, match=r"model.frozen: this rank holds .*\[0, 2\), the state has \[2, 4\)"):
        load_sharded_state_dict({**state, "model.scale": torch.tensor(1.0)}, cut(Model(), 0, 2))


def test_an_optimizer_over_other_parameters_says_how_to_mend_it() -> None:
    optimizer = adam(Model())
    with pytest.raises(ValueError, match=r"parameter 0 of the optimizer's group 0.*build the optimizer after"):
        sharded_state_dict(cut(Model(), 0, 2), optimizer)


def test_an_optimizer_of_full_parameters_is_refused_on_shards() -> None:
    model = nn.Linear(4, 4)
    weight = nn.Parameter(torch.ones(2, 4))
    set_shard(weight, Shard("weight", (4, 4), 0, 8))
    model.weight = weight
    optimizer = torch.optim.Adafactor([weight])
    weight.grad = torch.ones(2, 4)
    optimizer.step()
    with pytest.raises(ValueError, match=r"optimizer state weight.row_var has shape \(2, 1\), expected the shard's"):
        sharded_state_dict(model, optimizer)


def test_summands_of_a_parameter_have_no_state() -> None:
    model = nn.Linear(2, 2, bias=False)
    set_shard(model.weight, Shard("weight", (2, 2), 0, 4, (Axis(Group(), Placement.PARTIAL),)))
    with pytest.raises(ValueError, match="weight is a partial sum on each rank"):
        sharded_state_dict(model)


def test_two_parameters_that_claim_one_name_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for weight in model.parameters():
        set_shard(weight, Shard("weight", (2, 2), 0, 4))
    with pytest.raises(ValueError, match=r"two parameters are named weight: the second is listed as 1.weight"):
        sharded_state_dict(model)


class Pair(nn.Module):
    """Two weights, which may be one; registered in one order or the other."""

    def __init__(self, *names: str, tied: bool = True) -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.rand(3)))
        if tied:
            self.register_parameter(names[1], self.get_parameter(names[0]))


def test_a_tied_parameter_is_found_under_any_of_its_names() -> None:
    saved, other = Pair("embed", "head"), Pair("head", "embed")
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (saved, other)]
    saved.embed.grad = torch.ones(3)
    optimizers[0].step()
    state = sharded_state_dict(saved, optimizers[0])
    load_sharded_state_dict(state, other, optimizers[1])
    assert torch.equal(other.embed, saved.embed)
    assert torch.equal(optimizers[1].state[other.head]["momentum_buffer"], torch.ones(3))
    there = {key: SavedTensor((3,), torch.float32) if isinstance(v, Tensor) else v for key, v in state.items()}
    assert target_state_dict(other, optimizers[1], there)["model.embed"].data_ptr() == other.head.data_ptr()
    with pytest.raises(StateMismatch, match=r"1 unexpected in it: model.(embed|head)"):
        load_sharded_state_dict(sharded_state_dict(Pair("embed", "head", tied=False)), other)


class Part(nn.Module):
    """The last part of a model whose first and last weight are one; the first part is on another rank."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.bias = nn.Parameter(torch.rand(3)), nn.Parameter(torch.rand(2))

    def names_of_model(self) -> dict[str, str]:
        return {"embed": "embed", "middle": "middle", "head": "embed", "bias": "bias"}

    def is_first_holder(self, name: str) -> bool:
        return name == "bias"


def test_a_part_of_a_model_has_names_of_the_full_one() -> None:
    model = Part()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model.head.grad, model.bias.grad = torch.ones(3), torch.ones(2)
    optimizer.step()
    state = sharded_state_dict(model, optimizer)
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    assert [key for key in tensors if key.startswith("model.")] == ["model.embed", "model.bias"]
    written = {key: bool(v.__create_write_items__(key, v)) for key, v in tensors.items() if isinstance(v, LocalShard)}
    assert written == {"model.embed": False, "optim.embed.momentum_buffer": False}
    whole = {**state, "model.middle": torch.zeros(1), "optim.middle.momentum_buffer": torch.zeros(1)}
    (key,) = (key for key in state if key.startswith(GROUPS))
    whole[key] = {**whole[key], "params": ["embed", "middle", "bias"]}
    for given in (state, whole):  # Its own part, or what all ranks have.
        other = Part()
        fresh = torch.optim.SGD(other.parameters(), lr=0.7, momentum=0.9)
        load_sharded_state_dict(given, other, fresh)
        assert torch.equal(other.head, model.head) and torch.equal(other.bias, model.bias)
        assert type(fresh.state[other.head]["momentum_buffer"]) is Tensor
        assert fresh.param_groups[0]["lr"] == 0.1
    with pytest.raises(StateMismatch, match=r"1 unexpected in it: model.unknown"):
        load_sharded_state_dict({**whole, "model.unknown": torch.zeros(1)}, Part())
