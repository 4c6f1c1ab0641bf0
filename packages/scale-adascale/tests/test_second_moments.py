"""Adam's second moments: what each rank adds to their means, and what squares are divided by."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam

from scale_adascale.adam_preconditioner import Part, SecondMoments
from scale_core.comm.group import Group
from scale_core.shard import Axis, Held, Shard, mark

CPU = torch.device("cpu")


def stepped(*gradients: list[float], eps: float = 0.5) -> tuple[Adam, list[nn.Parameter]]:
    """One parameter in each group, after a step: the moment without its bias is the square of the gradient."""
    params = [nn.Parameter(torch.zeros(len(each))) for each in gradients]
    optimizer = Adam([{"params": [param], "eps": eps + number} for number, param in enumerate(params)])
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = torch.tensor(gradient)
    optimizer.step()
    return optimizer, params


def divided_by(*means: float, eps: float = 0.5) -> Tensor:
    numbers = enumerate(means)
    return torch.tensor([(mean**0.5 + eps + number) ** -2 for number, mean in numbers], dtype=torch.float64)


def test_one_rank_divides_by_its_own_means_with_each_groups_epsilon():
    optimizer, params = stepped([1.0, 2.0, 3.0], [2.0, 4.0])
    moments = SecondMoments(optimizer, [Part(param, param, 1.0) for param in params], Group(), (), CPU)
    torch.testing.assert_close(moments.divisors(), divided_by(14 / 3, 10.0), rtol=1e-5, atol=0)
    torch.testing.assert_close(moments.divisors_of(moments.part()), moments.divisors(), rtol=0, atol=0)


def test_what_ranks_have_alike_they_read_in_parts_that_add_up_to_the_mean():
    optimizer, (param,) = stepped([1.0, 2.0, 3.0, 4.0, 5.0])
    ranks = [Group(rank, size=2, ranks=(0, 1)) for rank in (0, 1)]
    parts = [SecondMoments(optimizer, [Part(param, param, 0.5)], group, (), CPU).part() for group in ranks]
    assert [part.tolist() for part in parts] == [[pytest.approx(5 / 5)], [pytest.approx(50 / 5)]]


def test_pieces_that_only_this_rank_has_count_whole_over_the_elements_of_the_parameter():
    optimizer, (piece,) = stepped([1.0, 2.0])
    whole = nn.Parameter(torch.zeros(5))
    for rank in (0, 1):
        moments = SecondMoments(optimizer, [Part(whole, piece, 1.0)], Group(rank, size=2, ranks=(0, 1)), (), CPU)
        assert moments.part().tolist() == [pytest.approx(5 / 5)]


def test_a_copy_of_what_others_have_counts_nothing():
    optimizer, (param,) = stepped([1.0, 2.0])
    group = Group(size=2, ranks=(0, 1))
    mark(param, Shard("weight", (2,), 0, 2, (Axis(group, Held.REPLICATE),), counted=False))
    moments = SecondMoments(optimizer, [Part(param, param, 1.0)], Group(), (), CPU)
    assert moments.part().tolist() == [0.0]


def test_groups_that_were_loaded_are_those_that_count():
    optimizer, (param,) = stepped([3.0])
    moments = SecondMoments(optimizer, [Part(param, param, 1.0)], Group(), (), CPU)
    saved = optimizer.state_dict()
    saved["param_groups"][0]["eps"] = 2.0
    optimizer.load_state_dict(saved)
    torch.testing.assert_close(moments.divisors(), divided_by(9.0, eps=2.0), rtol=1e-5, atol=0)
