"""crossings.py: where a tensor came into the divided region, as autograd remembers it."""

from __future__ import annotations

import torch

from scale_core.group import Group
from scale_tp.crossings import entered_with
from scale_tp.regions import copy_to_model_parallel_region

ONE, OTHER = (Group(0, 2, None, "fake", ranks) for ranks in ((0, 1), (0, 2)))


def test_a_tensor_knows_the_ranks_of_the_regions_that_it_was_computed_in() -> None:
    x = torch.ones(2, requires_grad=True)
    assert entered_with(x) == [] and entered_with(x.detach()) == [] and entered_with(x * 2) == []
    inside, elsewhere = copy_to_model_parallel_region(x * 2, ONE), copy_to_model_parallel_region(x, OTHER)
    assert entered_with((inside + 1).relu()) == [ONE]
    assert set(entered_with(inside + elsewhere)) == {ONE, OTHER}
