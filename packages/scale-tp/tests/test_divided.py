"""divided.py: modules keep their class and their names, and enter the divided region together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from scale_core.group import Group
from scale_tp.divided import Columns, Entrance, Rows, divide, is_embedding, is_linear, linear, outputs_dim, part_of
from scale_tp.layer import Placement
from scale_tp.parallelize import parallelize
from scale_tp.split_sizes import Split

TWO = Group(1, 2, None, "fake", (0, 1))


class Conv1D(nn.Module):
    """As transformers have it: [inputs, outputs]."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))


class OwnLinear(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Deaf(nn.Linear):
    pass


def test_linear_layers_are_those_with_torchs_forward_and_transposed_ones() -> None:
    assert is_linear(nn.Linear(2, 3)) and is_linear(Deaf(2, 3)) and is_linear(Conv1D(3, 2))
    assert not is_linear(OwnLinear(2, 3)) and not is_linear(nn.Bilinear(2, 2, 2))
    assert is_embedding(nn.Embedding(2, 3)) and not is_embedding(nn.Linear(2, 3))
    assert outputs_dim(nn.Linear(2, 3)) == 0 and outputs_dim(Conv1D(3, 2)) == 1


def test_both_kinds_compute_what_they_are() -> None:
    plain, transposed, x = nn.Linear(4, 3), Conv1D(3, 4), torch.randn(2, 5, 4)
    assert torch.equal(linear(plain, x, plain.weight, plain.bias), plain(x))
    expected = x @ transposed.weight + transposed.bias
    torch.testing.assert_close(linear(transposed, x, transposed.weight, transposed.bias), expected)
    torch.testing.assert_close(linear(transposed, x, transposed.weight, None), x @ transposed.weight)


def _columns() -> nn.Linear:
    module, split = nn.Linear(4, 3), Split.even(3, 2)
    placements = {"weight": Placement((3, 4), 0, split), "bias": Placement((3,), 0, split)}
    parts = {name: part_of(param, placements[name], TWO) for name, param in module.named_parameters()}
    entrance = Entrance(TWO, 1, "inside")
    divide(module, Columns, TWO, placements, split=split, entrance=entrance, gathers=False, randomness=None)
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


def test_an_input_that_is_cut_in_another_way_is_refused() -> None:
    rows = nn.Linear(5, 3)
    facts: dict[str, Any] = {"splits_input": False, "sums": True, "sequence_parallel": False, "randomness": None}
    divide(rows, Rows, TWO, {}, path="blocks.0.down", split=Split.even(5, 2), **facts)
    with pytest.raises(
        ValueError, match=r"'blocks.0.down': expected the 2 of 5 inputs that rank 1 of 2 has, got 3: the"
    ):
        rows(torch.zeros(1, 3))


def test_a_part_has_memory_of_its_own() -> None:
    whole = nn.Parameter(torch.arange(6.0).view(3, 2), requires_grad=False)
    part = part_of(whole, Placement((3, 2), 0, Split.even(3, 2)), TWO)
    assert part.tolist() == [[4.0, 5.0]] and not part.requires_grad
    whole.data.zero_()
    assert part.tolist() == [[4.0, 5.0]]
    meta = part_of(nn.Parameter(torch.empty(3, 2, device="meta")), Placement((3, 2), 1, Split.even(2, 2)), TWO)
    assert meta.is_meta and meta.shape == (3, 1)


class Counting(Entrance):
    """Counts how often something is brought in, on one rank."""

    entered = 0

    def _entered(self, input: torch.Tensor) -> torch.Tensor:
        self.entered += 1
        return input.clone()


def test_modules_that_bring_the_same_tensor_enter_once() -> None:
    entrance, x, y = Counting(TWO, 3, "copy"), torch.ones(2), torch.ones(2)
    first = entrance.enter(x)
    assert entrance.enter(x) is first and entrance.enter(x) is first and entrance.entered == 1
    assert entrance._inside is None  # The last one leaves nothing behind.
    assert entrance.enter(x) is not first  # The next pass enters anew.
    assert entrance.enter(y) is not entrance.enter(x) and entrance.entered == 4


class Reading(nn.Module):
    """One of its readers does not always read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.other = nn.Linear(4, 6), nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x)


def test_after_a_forward_nothing_is_kept_of_what_was_brought_in() -> None:
    model = parallelize(Reading(), {"up": "colwise", "other": "colwise"}, TWO, sync_module_states=False)
    assert model(torch.zeros(1, 4)).shape == (1, 3)
    assert model.up.entrance is model.other.entrance and model.up.entrance._inside is None


def test_what_was_changed_or_is_used_for_another_purpose_enters_anew() -> None:
    entrance, x = Counting(TWO, 3, "copy"), torch.ones(2)
    entrance.enter(x)
    x.add_(1)
    assert entrance.enter(x).tolist() == [2.0, 2.0] and entrance.entered == 2
    with torch.no_grad():
        entrance.enter(x)
    assert entrance.entered == 3
    with torch.inference_mode():
        z = torch.ones(2)
        assert entrance.enter(z) is entrance.enter(z)
    assert copy.deepcopy(entrance)._inside is None
