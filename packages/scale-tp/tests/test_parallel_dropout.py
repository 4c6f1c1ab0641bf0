"""dropout.py: dropout on a part of a tensor, with the elements that the whole one would lose."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scale_core.comm.group import Group, group_of
from scale_tp import ParallelDropout
from scale_tp.megatron import gather_from_sequence_parallel_region, scatter_to_sequence_parallel_region
from scale_tp.split import Split

TWO = Group(1, 2, ranks=(0, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_part_loses_what_it_loses_in_the_whole(dtype: torch.dtype, p: float, inplace: bool) -> None:
    whole = torch.randn(2, 7, 5).to(dtype)
    for dim, split in ((1, Split.even(7, 2)), (-1, Split.of_sizes([4, 1])), (0, Split.strided(2, 2, 1))):
        torch.manual_seed(6)
        expected, after = nn.Dropout(p)(whole), torch.rand(3)
        layer = ParallelDropout(p, inplace, dim=dim, split=split, process_group=TWO)
        part = split.take(whole, 1, dim).clone()
        torch.manual_seed(6)
        found = layer(part)
        assert torch.equal(found, split.take(expected, 1, dim))
        assert torch.equal(torch.rand(3), after), "random numbers go on alike"
        assert inplace is torch.equal(part, found) or p == 0.0


def test_in_evaluation_nothing_is_lost() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(ParallelDropout(0.5, process_group=TWO).eval()(x), x)


def test_one_process_has_torchs_dropout_without_initialization() -> None:
    x = torch.randn(4, 5)
    torch.manual_seed(0)
    expected = nn.Dropout(0.3)(x)
    torch.manual_seed(0)
    assert torch.equal(ParallelDropout(0.3)(x), expected)


@pytest.mark.ranks(2)
def test_a_sequence_that_was_divided_by_a_region_needs_no_split() -> None:
    group = group_of()
    x = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    torch.manual_seed(3)
    expected = nn.Dropout(0.4)(x)
    (wanted,) = torch.autograd.grad(expected.square().sum(), x)
    torch.manual_seed(3)
    part = ParallelDropout(0.4, process_group=group)(scatter_to_sequence_parallel_region(x, group))
    found = gather_from_sequence_parallel_region(part, group, to_model_parallel=False)
    (grad,) = torch.autograd.grad(found.square().sum(), x)
    assert {"output": torch.equal(found, expected), "gradient": torch.equal(grad, wanted)} == {
        "output": True,
        "gradient": True,
    }


def test_a_probability_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        ParallelDropout(1.5, process_group=TWO)
