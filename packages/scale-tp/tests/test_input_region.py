"""input_region.py: modules that read the same tensor go into the divided region together."""

from __future__ import annotations

import copy

import torch
from torch import nn

from scale_core.comm.group import Group
from scale_tp.conversion.parallelize import parallelize
from scale_tp.layers.input_region import Entrance

TWO = Group(1, 2, None, "fake", (0, 1))
READER = nn.Identity()


class Counting(Entrance):
    """Counts how often something is brought in, on one rank."""

    entered = 0

    def _entered(self, input: torch.Tensor, reader: nn.Module) -> torch.Tensor:
        self.entered += 1
        return input.clone()


def test_modules_that_bring_the_same_tensor_enter_once() -> None:
    entrance, x, y = Counting(TWO, 3, "copy"), torch.ones(2), torch.ones(2)
    first = entrance.enter(x, READER)
    assert entrance.enter(x, READER) is first and entrance.enter(x, READER) is first and entrance.entered == 1
    assert entrance._inside is None  # The last one leaves nothing behind.
    assert entrance.enter(x, READER) is not first  # The next pass enters anew.
    assert entrance.enter(y, READER) is not entrance.enter(x, READER) and entrance.entered == 4


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
    entrance.enter(x, READER)
    x.add_(1)
    assert entrance.enter(x, READER).tolist() == [2.0, 2.0] and entrance.entered == 2
    with torch.no_grad():
        entrance.enter(x, READER)
    assert entrance.entered == 3
    with torch.inference_mode():
        z = torch.ones(2)
        assert entrance.enter(z, READER) is entrance.enter(z, READER)
    assert copy.deepcopy(entrance)._inside is None
