"""autograd_regions.py: where a tensor came into the divided region, as autograd remembers it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scale_core.autograd_hooks import own_outputs
from scale_core.comm.group import Group
from scale_tp.autograd_regions import Leaving, check_inside, divides, division_of, entered_with
from scale_tp.mappings import copy_to_model_parallel_region, scatter_to_sequence_parallel_region

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
        ctx.ranks = ranks
        return divides(ctx, tensor * 2, 0, (2, 1))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def test_what_has_left_a_region_is_not_in_it_and_may_enter_another_one() -> None:
    inside = copy_to_model_parallel_region(torch.ones(2, requires_grad=True), ONE)
    outside: Tensor = Out.apply(ONE, inside)
    assert entered_with(outside) == [] and entered_with(outside.relu() + 1) == []
    assert entered_with(copy_to_model_parallel_region(outside, OTHER)) == [OTHER]


def test_what_was_computed_from_a_part_that_was_divided_tells_so() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    part: Tensor = Out.apply(ONE, x)
    assert division_of(part, ONE, 0) == division_of((x * 2 + part).relu(), ONE, -2) == (2, 1)
    assert division_of(part, ONE, 1) is division_of(part, OTHER, 0) is None, "of another dimension, or by others"
    for other in (x, x * 2, x.detach(), copy_to_model_parallel_region(x, ONE)):
        assert division_of(other, ONE, 0) is None


@pytest.mark.parametrize("length", [5, 2, 1])
def test_what_divided_a_part_depends_on_what_was_called_and_on_no_length(length: int) -> None:
    """Rank 0 has 3, 1 or 1 positions of a sequence; the answers are those of any rank."""
    whole = torch.randn(2, length, 4, requires_grad=True)
    part = scatter_to_sequence_parallel_region(whole, ONE, dim=1)
    sizes, own = (length - length // 2, length // 2), part.shape[1]
    same: list[Tensor] = [
        nn.Linear(4, 6)(part),
        nn.Linear(4, 6, bias=False)(F.gelu(nn.LayerNorm(4)(part))),
        F.rms_norm(part, (4,), nn.Parameter(torch.ones(4))),
        part * part.square().mean(-1, keepdim=True).rsqrt(),
        F.dropout(F.silu(part), 0.5) + part.bfloat16(),
        part.view(-1, 4).softmax(-1).view(2, -1, 4),
        own_outputs(part.view(2, -1, 4)),
        part.masked_fill(torch.ones(2, own, 1) > 2, 0.0).clamp(min=0),
    ]
    assert [division_of(tensor, ONE, 1) for tensor in same] == [sizes] * len(same)
    loaded = torch.randn(2, own, 4)  # May be a part of anything.
    other: list[Tensor] = [
        loaded * part.mean(),
        loaded * part.mean(1, keepdim=True),
        loaded + part[:, :1],
        loaded * part.amax((0, 1)),
        loaded @ (part.mT @ part),
        torch.cat([part, loaded], 1),
        part[:, :own],
        part.transpose(0, 1),
        part.reshape(2, -1, 2),
        part.view(-1, 4),
    ]
    assert [division_of(tensor, ONE, 1 if tensor.dim() == 3 else 0) for tensor in other] == [None] * len(other)


def test_features_that_were_divided_are_others_after_a_product() -> None:
    part = scatter_to_sequence_parallel_region(torch.randn(2, 5, requires_grad=True), ONE, dim=1)
    assert division_of(part * 2, ONE, 1) == (3, 2) and division_of(nn.Linear(3, 3)(part), ONE, 1) is None


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
