"""An optimizer's state is gathered as that of an optimizer of the plain model, and cut for whoever loads it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from state_cases import WRAPPINGS, Awkward, Layout, train, two_groups
from torch import nn
from torch.optim import Optimizer

from scale_check.exact import assert_equal
from scale_core.comm.group import Group
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard
from scale_fsdp import (
    FullyShardedDataParallel,
    ShardOptions,
    full_optim_state_dict,
    fully_shard,
    shard_optim_state_dict,
)
from scale_fsdp.runtime.unit import unit_of
from scale_fsdp.state_dict.optimizer import _contract_of

OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adam amsgrad": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "Adam fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "AdamW tensor rate": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), foreach=False),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
}


@pytest.mark.ranks(1, 2)
def test_every_optimizer_is_gathered_and_loaded_anywhere() -> None:
    def with_other_options(optimizer: Optimizer) -> Optimizer:
        for group in optimizer.param_groups:
            group["betas" if "betas" in group else "weight_decay"] = (0.5, 0.5) if "betas" in group else 0.25
        return optimizer

    def by_name(full: dict[str, Any]) -> dict[str, Any]:
        """The state in an order that does not depend on that of the optimizer's parameters."""
        groups = [{**group, "params": sorted(group["params"])} for group in full["param_groups"]]
        return {**full, "param_groups": groups}

    def whole_or_two(model: nn.Module, flatten: bool) -> Any:
        """One group where the model is compared with a flat one, else two."""
        return [p for group in two_groups(model) for p in group["params"]] if flatten else two_groups(model)

    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        flatten = number % 3 == 0
        wrapping = list(WRAPPINGS)[number % len(WRAPPINGS)]
        plain, model = Awkward(), Layout(wrapping=wrapping, flatten=flatten).shard(Awkward())
        plain_optimizer, optimizer = (make(whole_or_two(each, flatten)) for each in (plain, model))
        for each in ((plain, plain_optimizer), (model, optimizer)):
            train(*each, steps=2)
        expected = full_optim_state_dict(plain, plain_optimizer)
        full = full_optim_state_dict(model, optimizer, recipient_rank=None)
        assert expected is not None and full is not None
        # A fused kernel rounds the last elements of a range, which fill no vector, in another way.
        if "fused" not in name:
            assert_equal(by_name(full), by_name(expected), f"{name}: gathered")
        before = copy.deepcopy(full)
        into_plain = make(whole_or_two(plain, flatten))
        into_plain.load_state_dict(shard_optim_state_dict(full, plain, into_plain))
        assert_equal(by_name(full_optim_state_dict(plain, into_plain) or {}), by_name(full), f"{name}: in a plain one")
        other = Layout(wrapping="units", atom="element").shard(Awkward())
        into_other = with_other_options(make(whole_or_two(other, flatten)))
        into_other.load_state_dict(shard_optim_state_dict(full, other, into_other))
        again = full_optim_state_dict(other, into_other, recipient_rank=None)
        assert_equal(by_name(again or {}), by_name(full), f"{name}: under another wrapping")
        train(other, into_other, steps=1)
        assert_equal(full, before, f"{name}: what was given")


@pytest.mark.ranks(2)
def test_a_framework_s_own_optimizer_is_gathered_and_cut() -> None:
    class Wrapper:
        """An optimizer of a framework's own, which has the names that are asked for and no more."""

        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:
            return self.optimizer.param_groups

        def state_dict(self) -> dict[str, Any]:
            return {**self.optimizer.state_dict(), "loss_scale": 128.0}

    model = FullyShardedDataParallel(Awkward(), flatten_parameters=dist.get_world_size() == 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    on_one = full_optim_state_dict(model, Wrapper(optimizer), recipient_rank=1)
    full = full_optim_state_dict(model, Wrapper(optimizer), recipient_rank=None)
    assert full is not None
    loaded = shard_optim_state_dict(full, model)
    assert loaded.pop("loss_scale") == 128.0
    fresh = torch.optim.Adam(model.parameters(), lr=0.5)
    fresh.load_state_dict(loaded)
    assert_equal(fresh, optimizer)
    optimizer.step()  # without gradients; what was gathered stays as it was
    if dist.get_rank() == 0:
        with pytest.raises(TypeError, match="load the saved file on every rank, or gather it with recipient_rank=None"):
            shard_optim_state_dict(on_one, model)
    else:
        assert sorted(on_one) == ["loss_scale", "param_groups", "state"]
        shard_optim_state_dict(on_one, model)
    with pytest.raises(
        ValueError, match=r"^recipient_rank: expected one of the model's ranks, 0 to 1, or None for all .*2$"
    ):
        full_optim_state_dict(model, optimizer, recipient_rank=2)


def trained(flatten: bool = False, **options: Any) -> tuple[nn.Module, Optimizer, dict[str, Any]]:
    model = Layout(flatten=flatten).shard(Awkward())
    optimizer = torch.optim.Adam(two_groups(model, **options), lr=0.1)
    train(model, optimizer)
    full = full_optim_state_dict(model, optimizer)
    assert full is not None
    return model, optimizer, full


def test_without_an_optimizer_parameters_keep_the_saved_order() -> None:
    model, optimizer, full = trained()
    loaded = shard_optim_state_dict(full, model)
    expected = optimizer.state_dict()
    assert_equal([group["params"] for group in loaded["param_groups"]], [[0, 1, 2, 3], [4, 5, 6, 7, 8]], "numbers")
    assert_equal(loaded["state"], expected["state"], "state")
    turned = torch.optim.Adam(reversed([*model.parameters()]), lr=0.1)
    train(model, turned, steps=1)
    full = full_optim_state_dict(model, turned)
    assert full is not None
    assert_equal(shard_optim_state_dict(full, model)["state"], turned.state_dict()["state"], "in another order")
    flat, flat_optimizer, full = trained(flatten=True)
    assert_equal(shard_optim_state_dict(full, flat)["state"], flat_optimizer.state_dict()["state"], "flat")
    assert full["param_groups"][0]["params"] == [n for n, p in Awkward().named_parameters() if p.requires_grad]


def test_a_loaded_optimizer_shares_no_memory_with_the_state() -> None:
    model, optimizer, full = trained()
    before = copy.deepcopy(full)
    optimizer.load_state_dict(shard_optim_state_dict(full, model, optimizer))
    train(model, optimizer, steps=1)
    assert_equal(full, before, "full")


def test_frozen_parameters_are_in_the_groups_and_have_no_state() -> None:
    model = fully_shard(Awkward())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, optimizer)
    full = full_optim_state_dict(model, optimizer)
    assert full is not None
    assert full["param_groups"][0]["params"] == [name for name, _ in Awkward().named_parameters()]
    assert "frozen.weight" not in full["state"]
    assert full["state"]["nothing"]["exp_avg"].shape == (0, 4)
    assert full["state"]["scale"]["exp_avg"].shape == ()


def other_name(full: dict[str, Any]) -> None:
    full["param_groups"][0]["params"][0] = "other"


MISFITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "the saved optimizer has 1 parameter groups, this one 2: build the optimizer with": lambda full: full[
        "param_groups"
    ].pop(),
    "'embed.weight' is only in the optimizer's .1 differ.: build the optimizer with": lambda full: full["param_groups"][
        0
    ]["params"].remove("embed.weight"),
    r"embed.weight.exp_avg: the saved shape is \(5, 7\), expected \(7, 5\)": lambda full: full["state"][
        "embed.weight"
    ].update(exp_avg=torch.zeros(5, 7)),
    "'nothing' is only in the optimizer's .2 differ": other_name,
}


@pytest.mark.parametrize("message", MISFITS)
def test_a_state_that_does_not_fit_is_refused_by_name(message: str) -> None:
    model, optimizer, full = trained()
    MISFITS[message](full)
    with pytest.raises(ValueError, match=message):
        shard_optim_state_dict(full, model, optimizer)


def test_what_is_no_state_by_name_is_refused() -> None:
    model, optimizer, full = trained()
    with pytest.raises(ValueError, match=r"by numbers, .*full_optim_state_dict\(plain_model, plain_optimizer\)"):
        shard_optim_state_dict(optimizer.state_dict(), model, optimizer)
    with pytest.raises(ValueError, match=r"expected the state of an optimizer, .*, got dict"):
        shard_optim_state_dict({"state": {}}, model, optimizer)
    other_name(full)
    with pytest.raises(ValueError, match="the model has no parameter 'other', which is in group 0"):
        shard_optim_state_dict(full, model)
    stranger = torch.optim.Adam(nn.Linear(2, 2).parameters())
    for attempt in (
        lambda: shard_optim_state_dict(full, model, stranger),
        lambda: full_optim_state_dict(model, stranger),
    ):
        with pytest.raises(
            ValueError, match=r"parameter 0 of the optimizer's group 0, of shape .*, is none of the model"
        ):
            attempt()


def test_what_one_flat_parameter_shares_must_be_alike() -> None:
    model, optimizer, full = trained(flatten=True)
    counted = copy.deepcopy(full)
    counted["state"]["body.0.bias"]["step"] += 1
    with pytest.raises(ValueError, match=r"body.0.bias.step is 4.0 and .* is 3.0, but one flat parameter holds"):
        shard_optim_state_dict(counted, model, optimizer)
    lacking = copy.deepcopy(full)
    del lacking["state"]["body.0.bias"]["exp_avg"]
    with pytest.raises(ValueError, match=r"body.0.bias.exp_avg is missing in the state, but .* has one, and one flat"):
        shard_optim_state_dict(lacking, model, optimizer)
    full["param_groups"][0]["params"].remove("body.0.bias")
    with pytest.raises(
        ValueError, match=r"one flat parameter holds 'body.0.bias' and others of group 0, in which it was"
    ):
        shard_optim_state_dict(full, model)


def test_groups_of_named_parameters_keep_their_own_names() -> None:
    model = fully_shard(Awkward(), options=ShardOptions(flatten_parameters=True))
    optimizer = torch.optim.Adam(model.named_parameters(), lr=0.1)
    train(model, optimizer)
    full = full_optim_state_dict(model, optimizer)
    assert full is not None
    assert "param_names" not in full["param_groups"][0]
    plain = Awkward()
    into_plain = torch.optim.Adam(plain.named_parameters(), lr=0.1)
    into_plain.load_state_dict(shard_optim_state_dict(full, plain, into_plain))
    assert into_plain.param_groups[0]["param_names"] == [name for name, _ in plain.named_parameters()]


def test_after_a_move_the_contract_is_that_of_the_new_ranks() -> None:
    model = fully_shard(nn.Linear(2, 2), options=ShardOptions(limit_seconds=7.0))
    model(torch.ones(1, 2))
    before = unit_of(model).root.contract
    assert _contract_of(model) is before
    model.double()
    assert _contract_of(model) is not before
    assert _contract_of(model).limit_seconds == 7.0


@pytest.mark.parametrize(("value", "kind"), [([torch.zeros(1)], "list"), ({1: 2}, "dict"), (object(), "object")])
def test_what_could_not_be_sharded_again_by_name_is_refused(value: Any, kind: str) -> None:
    model, optimizer, _ = trained()
    optimizer.state[next(model.parameters())]["v"] = value
    with pytest.raises(ValueError, match=rf"optimizer state .*\.v is a {kind}, expected a tensor or a number"):
        full_optim_state_dict(model, optimizer)


def test_a_parameter_divided_outside_of_any_unit_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    axis = Axis(Group(rank=0, size=2), Placement.SHARD)
    set_shard(model.weight, Shard("weight", (4, 2), 0, 4, (axis,), gathered=False))
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match=r"'weight' is divided by its layer.*sharded_state_dict\(model, optimizer\)"):
        full_optim_state_dict(model, optimizer)


def test_a_parameter_shared_with_a_unit_outside_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = model[0].weight
    for layer in model:
        fully_shard(layer)
    optimizer = torch.optim.Adam(model[1].parameters())
    with pytest.raises(ValueError, match=r"'weight' is shared with a unit outside of this model.*holds both units"):
        full_optim_state_dict(model[1], optimizer)
