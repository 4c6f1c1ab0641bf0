"""Groups of an optimizer find their options by the names of their parameters, whoever had which of them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from scale_core.state import load_sharded_state_dict, sharded_state_dict
from scale_core.state.param_groups import (
    GROUPS,
    SavedGroup,
    check_options,
    fill_groups,
    group_entries,
    is_group,
    matching_options,
    saved_groups,
)
from scale_core.state.validation import StateMismatch

Names = list[list[str]]


def optimizer(names: Names, **options: Any) -> torch.optim.Optimizer:
    groups = [{"params": [nn.Parameter(torch.ones(1)) for _ in each], "lr": 0.5} for each in names]
    return torch.optim.SGD(groups, **{"lr": 0.1, **options})


def entries(*ranks: tuple[Names, list[float]]) -> dict[str, Any]:
    """What ranks save whose groups have these names and learning rates."""
    state: dict[str, Any] = {}
    for names, rates in ranks:
        one = optimizer(names)
        for group, rate in zip(one.param_groups, rates, strict=True):
            group["lr"] = rate
        state.update(group_entries(one, names))
    return state


def found(names: Names, state: dict[str, Any], elsewhere: str = "") -> list[Any]:
    here = lambda name: None if name in elsewhere else name  # noqa: E731
    options = matching_options(optimizer(names), names, saved_groups(state), here)
    return [each.get("lr") for each in options]


def test_parts_of_a_group_are_entries_and_equal_ones_are_one() -> None:
    both = entries(([["a"], ["b"]], [1.0, 2.0]), ([["c"], []], [1.0, 2.0]), ([["a"], ["b"]], [1.0, 2.0]))
    assert len(both) == 4 and all(is_group(key) for key in both)
    assert [(group.number, group.names) for group in saved_groups(both)] == [
        (0, ("a",)),
        (0, ("c",)),
        (1, ("b",)),
        (1, ()),
    ]
    assert not is_group("optim.groups.0.weight.exp_avg"), "a module of a model may be called so"


def test_a_group_is_joined_from_parts_of_ranks_and_cut_again() -> None:
    cut = entries(([["a"], ["b"]], [1.0, 2.0]), ([["c"], []], [1.0, 2.0]))
    assert found([["a", "c"], ["b"]], cut) == [1.0, 2.0]
    whole = entries(([["a", "c"], ["b"]], [1.0, 2.0]))
    assert found([["c"], []], whole, elsewhere="ab") == [1.0, 2.0], "an empty group has what its number had"
    assert found([["a"], ["b"]], whole, elsewhere="c") == [1.0, 2.0]
    # Ranks that leave out groups without parameters number them in another way; then nothing is said of empty ones.
    dropped = entries(([["a"], ["b"]], [1.0, 2.0]), ([["d"]], [2.0]))
    assert found([["a"], ["b", "d"]], dropped) == [1.0, 2.0]
    assert found([[], ["b", "d"]], dropped, elsewhere="a") == [None, 2.0]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([["a"], ["b"], ["c"]], r"a and c were saved in one group, and stand in the groups 0 and 2 of the optimizer"),
        (
            [["a", "b", "c"]],
            r"group 0 of the optimizer has parameters of saved groups with other options: lr is 1.0",
        ),
        ([["a", "c"], ["b", "e"]], r"group 1 of the optimizer has e, which was saved in none: build"),
        ([["a", "c", "d"], ["b", "e"]], r"group 0 of .* has d, which was saved in none: .* \(the same holds for e\)"),
    ],
)
def test_groups_that_were_put_together_otherwise_are_refused(names: Names, message: str) -> None:
    state = entries(([["a", "c"], ["b"]], [1.0, 2.0]))
    with pytest.raises(StateMismatch, match=message):
        found(names, state)


def test_options_get_lists_of_their_own() -> None:
    one = optimizer([["a"], ["b"]])
    given: list[Any] = [1.0, 2.0]
    fill_groups(one, [{"betas": given}, {"betas": given}])
    assert one.param_groups[0]["betas"] == given is not one.param_groups[0]["betas"]
    assert one.param_groups[0]["betas"] is not one.param_groups[1]["betas"]


def test_groups_in_one_list_of_older_snapshots_are_read() -> None:
    model = nn.Linear(2, 2)
    made = torch.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}], lr=0.1)
    state = sharded_state_dict(model, made)
    old = {key: value for key, value in state.items() if not is_group(key)}
    old[GROUPS] = [{**group.options, "params": list(group.names)} for group in saved_groups(state)]
    assert saved_groups(old) == saved_groups(state)
    assert isinstance(saved_groups(old)[0], SavedGroup)
    fresh = nn.Linear(2, 2)
    other = torch.optim.AdamW([{"params": [fresh.weight]}, {"params": [fresh.bias]}], lr=0.7)
    load_sharded_state_dict(old, fresh, other)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.5]


def test_several_optimizers_of_one_model_are_saved_together() -> None:
    def built(scale: float) -> tuple[nn.Linear, list[torch.optim.Optimizer]]:
        model = nn.Linear(2, 2)
        made: list[torch.optim.Optimizer] = [
            torch.optim.AdamW([model.weight], lr=0.1 * scale),
            torch.optim.SGD([model.bias], lr=0.2 * scale, momentum=0.9),
        ]
        return model, made

    model, both = built(1.0)
    model(torch.ones(1, 2)).sum().backward()
    for each in both:
        each.step()
    fresh, others = built(3.0)
    load_sharded_state_dict(sharded_state_dict(model, both), fresh, others)
    assert torch.equal(fresh.weight, model.weight) and [each.param_groups[0]["lr"] for each in others] == [0.1, 0.2]
    assert torch.equal(others[0].state[fresh.weight]["exp_avg"], both[0].state[model.weight]["exp_avg"])
    assert torch.equal(others[1].state[fresh.bias]["momentum_buffer"], both[1].state[model.bias]["momentum_buffer"])
    with pytest.raises(StateMismatch, match=r"1 unexpected in it: optim.bias.momentum_buffer"):
        load_sharded_state_dict(sharded_state_dict(model, both), fresh, others[0])


@pytest.mark.fault(112)
def test_options_of_another_kind_are_refused() -> None:
    live = {"lr": 0.1, "eps": (None, 0.1), "betas": (0.9, 0.99), "amsgrad": False, "foreach": None, "own": [1, 2]}
    right = {"lr": 1, "eps": [1e-30, None], "betas": [0.5, 0.5], "amsgrad": 1, "foreach": True, "own": [1]}
    defaults = {name: value for name, value in live.items() if name != "own"}
    check_options(right, live, defaults)
    check_options({**right, "lr": None}, live, defaults)
    for name, value, expected in (
        ("lr", "fast", "a number"),
        ("lr", [0.1], "a number"),
        ("betas", [0.9], "2 numbers"),
        ("betas", [0.9, "x"], "2 numbers"),
        ("amsgrad", 3, "true or false"),
    ):
        told = re.escape(
            f"optim.groups: '{name}' was saved as {value!r}, expected {expected}: the snapshot was changed"
        )
        with pytest.raises(StateMismatch, match=told):
            check_options({**right, name: value}, live, defaults)
