"""linear_ops.py: functional linear layers, and the input that several modules share."""

from __future__ import annotations

import copy

import torch
from torch import nn

from scale_core.comm.group import Group
from scale_tp.conversion.parallelize import parallelize
from scale_tp.layers.linear_ops import SharedInput

TWO = Group(1, 2, None, "fake", (0, 1))
READER = nn.Identity()


class Counting(SharedInput):
    """Counts how often something is brought in, on one rank."""

    entered = 0

    def _bring_in(self, input: torch.Tensor, reader: nn.Module) -> torch.Tensor:
        self.entered += 1
        return input.clone()


def test_modules_that_bring_the_same_tensor_enter_once() -> None:
    shared, x, y = Counting(TWO, 3, "copy"), torch.ones(2), torch.ones(2)
    first = shared.to_region(x, READER)
    assert shared.to_region(x, READER) is first and shared.to_region(x, READER) is first and shared.entered == 1
    assert shared._inside is None  # The last one leaves nothing behind.
    assert shared.to_region(x, READER) is not first  # The next pass enters anew.
    assert shared.to_region(y, READER) is not shared.to_region(x, READER) and shared.entered == 4


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
    assert model.up.shared_input is model.other.shared_input and model.up.shared_input._inside is None


def test_a_changed_input_or_one_of_another_use_enters_again() -> None:
    shared, x = Counting(TWO, 3, "copy"), torch.ones(2)
    shared.to_region(x, READER)
    x.add_(1)
    assert shared.to_region(x, READER).tolist() == [2.0, 2.0] and shared.entered == 2
    with torch.no_grad():
        shared.to_region(x, READER)
    assert shared.entered == 3
    with torch.inference_mode():
        z = torch.ones(2)
        assert shared.to_region(z, READER) is shared.to_region(z, READER)
    assert copy.deepcopy(shared)._inside is None
