"""crossings.py: where a tensor came into the divided region, as autograd remembers it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from scale_core.group import Group
from scale_tp.crossings import Leaving, check_inside, entered_with, was_divided
from scale_tp.regions import copy_to_model_parallel_region

ONE, OTHER = (Group(0, 2, None, "fake", ranks) for ranks in ((0, 1), (0, 2)))


def test_a_tensor_knows_the_ranks_of_the_regions_that_it_was_computed_in() -> None:
    x = torch.ones(2, requires_grad=True)
    assert entered_with(x) == [] and entered_with(x.detach()) == [] and entered_with(x * 2) == []
    inside, elsewhere = copy_to_model_parallel_region(x * 2, ONE), copy_to_model_parallel_region(x, OTHER)
    assert entered_with((inside + 1).relu()) == [ONE]
    assert set(entered_with(inside + elsewhere)) == {ONE, OTHER}


class Out(Leaving):
    """Comes out as a part."""

    @staticmethod
    def forward(ctx: Any, ranks: Group, tensor: Tensor) -> Tensor:
        ctx.ranks, ctx.parts = ranks, (2, 1)
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def test_what_has_left_a_region_is_not_in_it_and_may_enter_another_one() -> None:
    inside = copy_to_model_parallel_region(torch.ones(2, requires_grad=True), ONE)
    outside: Tensor = Out.apply(ONE, inside)
    assert entered_with(outside) == [] and entered_with(outside.relu() + 1) == []
    assert entered_with(copy_to_model_parallel_region(outside, OTHER)) == [OTHER]


def test_what_was_computed_from_a_part_that_was_divided_tells_so() -> None:
    x = torch.ones(2, requires_grad=True)
    part: Tensor = Out.apply(ONE, x)
    assert was_divided(part, ONE, 2) and was_divided((x * 2 + part).relu(), ONE, 2)
    assert not was_divided(part, ONE, 1) and not was_divided(part, OTHER, 2), "of another length, or by others"
    for other in (x, x * 2, x.detach(), copy_to_model_parallel_region(x, ONE)):
        assert not was_divided(other, ONE, 2)


def test_what_is_said_to_be_inside_must_have_been_brought_there() -> None:
    x = torch.ones(2, requires_grad=True)
    check_inside("Layer", copy_to_model_parallel_region(x, ONE) * 2, ONE)
    check_inside("Layer", x, Group())
    check_inside("Layer", x.detach(), ONE)
    with torch.no_grad():
        check_inside("Layer", x, ONE)
    for outside in (x, x * 2, copy_to_model_parallel_region(x, OTHER)):
        with pytest.raises(ValueError, match=r"Layer: input_is_inside=True, but .* pass scale_tp.copy_to_model_par"):
            check_inside("Layer", outside, ONE)
