"""divided.py: modules keep their class and their names, and have this rank's parts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from scale_core.group import Group
from scale_tp.divided import divide, part_of
from scale_tp.divided_linear import Columns, Rows
from scale_tp.entrance import Entrance
from scale_tp.layer import Placement
from scale_tp.split_sizes import Split

TWO = Group(1, 2, None, "fake", (0, 1))


def _columns() -> nn.Linear:
    module, split = nn.Linear(4, 3), Split.even(3, 2)
    placements = {"weight": Placement((3, 4), 0, split), "bias": Placement((3,), 0, split)}
    parts = {name: part_of(param, placements[name], TWO) for name, param in module.named_parameters()}
    entrance = Entrance(TWO, 1, "inside")
    facts = {"path": "up", "split": split, "entrance": entrance, "gathers": False, "randomness": None}
    divide(module, Columns, TWO, placements, **facts)
    for name, part in parts.items():
        module.register_parameter(name, part)
    return module


def test_a_divided_module_keeps_its_class_its_names_and_its_part() -> None:
    module, x = _columns(), torch.randn(2, 4)
    assert isinstance(module, nn.Linear) and type(module).__name__ == "Linear"
    assert {name: tuple(param.shape) for name, param in module.named_parameters()} == {"weight": (1, 4), "bias": (1,)}
    assert "one of 2 parts" in repr(module)
    for other in (module, copy.deepcopy(module)):
        assert type(other) is type(module)
        torch.testing.assert_close(other(x), x @ module.weight.T + module.bias)
    whole = nn.Linear(4, 3)
    module.load_state_dict(whole.state_dict())
    assert torch.equal(module.weight, whole.weight[2:])


def test_one_class_is_made_of_each_pair_of_classes() -> None:
    assert type(_columns()) is type(_columns())
    rows = nn.Linear(3, 3)
    divide(rows, Rows, TWO, {})
    assert type(rows) is not type(_columns()) and isinstance(rows, Rows)
    with pytest.raises(AssertionError, match=r"Rows declares none of .*'gathers'"):
        divide(nn.Linear(3, 3), Rows, TWO, {}, gathers=True)


def test_a_part_has_memory_of_its_own() -> None:
    whole = nn.Parameter(torch.arange(6.0).view(3, 2), requires_grad=False)
    part = part_of(whole, Placement((3, 2), 0, Split.even(3, 2)), TWO)
    assert part.tolist() == [[4.0, 5.0]] and not part.requires_grad
    whole.data.zero_()
    assert part.tolist() == [[4.0, 5.0]]
    meta = part_of(nn.Parameter(torch.empty(3, 2, device="meta")), Placement((3, 2), 1, Split.even(2, 2)), TWO)
    assert meta.is_meta and meta.shape == (3, 1)
