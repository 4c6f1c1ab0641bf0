"""linear_ops.py: functional linear layers, and the input that several modules share."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from scale_core.comm.group import Group, group_of
from scale_tp.async_tp.lazy_input import DeferredInput
from scale_tp.conversion.parallelize import parallelize
from scale_tp.layers.linear_ops import SharedInput, check_num_features, check_parallel_input
from scale_tp.mappings import copy_to_tensor_model_parallel_region
from scale_tp.split import Split

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


FIVE = Split.even(5, 2)


def test_a_tensor_with_those_features_or_a_lazy_one_is_accepted() -> None:
    check_num_features("Layer", torch.ones(2, 3), 3)
    check_num_features("Layer", DeferredInput(torch.ones(2, 3), TWO, None, 1), 3)


@pytest.mark.parametrize(
    "given, error, message",
    [
        (torch.ones(2, 3).numpy(), TypeError, r"Layer: expected a tensor \[..., 3\], got ndarray"),
        (None, TypeError, "got NoneType"),
        (torch.ones(2, 4), ValueError, r"Layer: expected an input \[..., 3\], got \[2, 4\]"),
        (torch.tensor(1.0), ValueError, r"got \[\]"),
    ],
)
def test_what_is_no_such_tensor_is_refused(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_num_features("Layer", given, 3)


def test_features_that_other_ranks_have_divided_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got \[2, 4\]: divide alike$"):
        check_num_features("Layer", torch.ones(2, 4), 3, fix="divide alike")
    nothing: Any = None
    with pytest.raises(TypeError, match=r"Layer: expected a tensor \[..., 2\], got NoneType"):
        check_parallel_input("Layer", nothing, TWO, FIVE, None, fix="divide alike")
    assert check_parallel_input("Layer", torch.ones(4, 2), TWO, FIVE, None, fix="divide alike") == 2
    with pytest.raises(ValueError, match=r"Layer: expected the 5 input features .* \[3, 2\] .*, got 3 of them: divide"):
        check_parallel_input("Layer", torch.ones(4, 3), TWO, FIVE, 2, fix="divide alike")
    elsewhere = copy_to_tensor_model_parallel_region(
        torch.ones(4, 2, requires_grad=True), Group(0, 2, None, "fake", (0, 2))
    )
    with pytest.raises(ValueError, match=r"between ranks \[0, 1\], but its input .* between ranks \[0, 2\]"):
        check_parallel_input("Layer", elsewhere, TWO, FIVE, None, fix="divide alike")


@pytest.mark.ranks(2)
def test_an_input_that_fits_one_rank_only_is_refused_on_all() -> None:
    group = group_of()
    # Rank 0 has its 3 of 5, and learns at once that rank 1 has not its 2.
    with pytest.raises(ValueError, match=r"got \[3, 3\] of them"):
        check_parallel_input("Layer", torch.ones(4, 3), group, FIVE, None, fix="divide alike")
