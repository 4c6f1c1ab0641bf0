"""Who has what of an optimizer's parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam

from scale_adascale.measurement.norm_reduction import key_of
from scale_adascale.measurement.param_info import (
    NormWeights,
    data_group_of,
    model_group_of,
    model_split_groups,
    norm_weights,
    param_info_of,
)
from scale_core.comm.group import Group, group_of
from scale_core.hooks.gradients import mark_without_autograd_hooks
from scale_core.hooks.microbatch_grads import register_pipeline
from scale_core.hooks.source_grads import mark_averaged
from scale_core.shard import Axis, Placement, Shard
from scale_core.sharded_tensor.tensor import set_shard


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(number + 1)) for number in range(3)]


def test_parameters_are_numbered_group_by_group() -> None:
    one, two, three = params()
    info = param_info_of(SGD([{"params": [two]}, {"params": []}, {"params": [three, one]}], lr=0.1), Group(), Group())
    assert all(map(lambda mine, its: mine is its, info.params, [two, three, one]))
    assert info.group_index.tolist() == [0, 2, 2] and info.holders == info.params
    assert info.local_weights.tolist() == info.total_weights.tolist() == [1.0] * 3 and not any(info.is_shared)


def test_of_what_ranks_with_other_data_share_each_reads_some() -> None:
    info = param_info_of(SGD(params(), lr=0.1), Group(1, 2, None, "fake", (0, 1)), Group())
    assert info.is_shared == [True] * 3
    assert info.portions == [(0, 1), (0, 1), None]  # The longest first, to the rank that reads least so far.
    assert info.local_weights.tolist() == info.total_weights.tolist() == [1.0] * 3


def test_ranks_read_parts_of_long_gradients_and_share_short_ones() -> None:
    longs, short = [nn.Parameter(torch.empty(2**17)) for _ in range(2)], [nn.Parameter(torch.ones(5)) for _ in range(6)]
    found = [
        param_info_of(SGD([*short, *longs], lr=0.1), Group(rank, 3, None, "fake", (0, 1, 2)), Group()).portions
        for rank in range(3)
    ]
    for rank, portions in enumerate(found):
        assert portions[6:] == [(rank, 3)] * 2
        assert portions[:6].count((0, 1)) == 2 and portions[:6].count(None) == 4
    assert all(readers.count((0, 1)) == 1 for readers in list(zip(*found, strict=True))[:6])


def test_an_info_is_for_these_parameters_groups_and_reductions() -> None:
    one, two, three = params()
    optimizer = SGD([one, two], lr=0.1)
    seen = [key_of(optimizer)]
    optimizer.param_groups[0]["params"][1] = three
    seen.append(key_of(optimizer))
    optimizer.add_param_group({"params": [two]})
    seen.append(key_of(optimizer))
    optimizer.gets_reduced_gradients = True  # type: ignore[attr-defined]
    seen.append(key_of(optimizer))
    assert len(set(seen)) == 4


def group(*ranks: int) -> Group:
    return Group(0, len(ranks), None, "fake", ranks)


def piece(*axes: Axis, reported: bool = False, counted: bool = True) -> torch.Tensor:
    param = torch.ones(2)
    set_shard(param, Shard("up.weight", (8,), 0, 2, axes, counted=counted))
    if reported:
        mark_without_autograd_hooks([param])
    return param


WORLD, COLUMN, ROW = group(0, 1, 2, 3), group(0, 2), group(0, 1)
NOBODY = group(0)


@pytest.mark.parametrize(
    "param, data, model, expected",
    [
        (torch.ones(2), WORLD, NOBODY, NormWeights(1.0, 0.25)),
        (piece(Axis(WORLD, Placement.SHARD), reported=True), WORLD, NOBODY, NormWeights(1.0, 1.0)),
        (
            piece(Axis(COLUMN, Placement.SHARD), Axis(ROW, Placement.REPLICATE), reported=True),
            WORLD,
            NOBODY,
            NormWeights(1.0, 0.5),
        ),
        (piece(Axis(ROW, Placement.SHARD)), COLUMN, ROW, NormWeights(1.0, 0.5)),
        (piece(Axis(ROW, Placement.REPLICATE)), COLUMN, ROW, NormWeights(0.5, 0.5)),
        (
            piece(Axis(COLUMN, Placement.SHARD), Axis(ROW, Placement.SHARD), reported=True),
            COLUMN,
            ROW,
            NormWeights(1.0, 1.0),
        ),
        (piece(Axis(ROW, Placement.SHARD), counted=False), COLUMN, ROW, NormWeights(0.0, 0.5)),
        (piece(Axis(ROW, Placement.SHARD, num_sources=2)), WORLD, NOBODY, NormWeights(1.0, 0.5)),
        (
            piece(Axis(COLUMN, Placement.SHARD), Axis(ROW, Placement.SHARD, num_sources=2), reported=True),
            WORLD,
            NOBODY,
            NormWeights(1.0, 1.0),
        ),
    ],
)
def test_each_element_counts_once(param, data, model, expected):
    assert norm_weights(param, param, data, model) == expected


def test_second_moments_of_a_piece_count_with_full_gradients():
    """For example, OSS under DistributedDataParallel: all ranks have gradients, and one has Adam's state of a piece."""
    param, half = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(2))
    set_shard(half, Shard("up.weight", (8,), 0, 2, (Axis(WORLD, Placement.SHARD),)))
    optimizer = Adam([param])
    optimizer.state[half] = {"exp_avg_sq": torch.tensor([1.0, 3.0]), "step": torch.tensor(1.0)}
    optimizer.grad_holders = lambda: [(param, half)]
    info = param_info_of(optimizer, WORLD, NOBODY)
    assert info.holders[0] is param and info.is_shared == [True]
    # This rank's summand of the mean over all eight elements, without the bias of the first step.
    assert info.moments.local_means().tolist() == [pytest.approx((1.0 + 3.0) / 8 / (1 - 0.999))]


def test_what_says_nothing_of_a_split_is_alike_there():
    assert norm_weights(torch.ones(2), torch.ones(2), COLUMN, ROW, [ROW]) == NormWeights(0.5, 0.5)


def test_the_directions_beside_data_are_found():
    params = [piece(Axis(ROW, Placement.SHARD)), piece(Axis(COLUMN, Placement.SHARD)), torch.ones(1)]
    assert model_split_groups(params, COLUMN) == {(0, 1): ROW}


@pytest.mark.parametrize(
    "param",
    [
        piece(Axis(ROW, Placement.SHARD)),  # A tensor parallel layer, under DistributedDataParallel or alone.
        piece(Axis(COLUMN, Placement.SHARD), Axis(ROW, Placement.SHARD), reported=True),  # The same, sharded.
    ],
)
def test_tensor_parallel_ranks_are_no_data_parallel_ranks(param):
    with pytest.raises(ValueError, match=r"'up\.weight' is divided over.*too small a gain.*process_group=the data"):
        norm_weights(param, param, WORLD, NOBODY)


def test_ranks_that_divide_experts_have_other_data():
    averaged = torch.ones(2)
    mark_averaged(averaged, ROW)
    for param in (piece(Axis(ROW, Placement.SHARD, num_sources=2)), averaged):
        with pytest.raises(ValueError, match=r"samples of the ranks \[0, 1\], which divide experts.*has \[0, 2\]"):
            norm_weights(param, param, COLUMN, ROW)
    both = piece(Axis(WORLD, Placement.SHARD, num_sources=2))
    with pytest.raises(ValueError, match=r"'up.weight' is of experts whose hidden features are divided.*one dimension"):
        norm_weights(both, both, WORLD, NOBODY)


def announced(ranks: Group, with_parameters: Group | None = None) -> tuple[nn.Module, SGD]:
    model = nn.Linear(2, 1)
    register_pipeline(model, ranks, with_parameters)
    return model, SGD(model.parameters(), lr=0.1)


def fake(*ranks: int) -> Group:
    return Group(0, len(ranks), None, "fake", ranks)


def test_without_a_pipeline_all_have_other_data_and_all_layers() -> None:
    optimizer = SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert data_group_of(optimizer, None) == group_of()
    assert model_group_of(optimizer, Group(), None) == Group()


def test_pipeline_ranks_with_parameters_have_other_layers() -> None:
    pipeline = fake(0, 3, 5)
    model, optimizer = announced(pipeline)
    assert model_group_of(optimizer, Group(), None) is pipeline
    register_pipeline(model, pipeline, fake(0, 5))
    assert model_group_of(optimizer, Group(), None) == fake(0, 5)
    register_pipeline(model, pipeline, Group())
    assert model_group_of(optimizer, Group(), None) == Group()


def test_a_given_group_is_taken_unless_it_has_other_stages(monkeypatch) -> None:
    model, optimizer = announced(fake(0, 3))
    monkeypatch.setattr("scale_adascale.measurement.param_info.group_of", lambda given, *axes: given)
    replicas = fake(0, 1)
    assert data_group_of(optimizer, replicas) is replicas
    assert model_group_of(optimizer, replicas, fake(0, 2)) == fake(0, 2)
    with pytest.raises(ValueError, match=r"some have other stages of the pipeline over \[0, 3\].*process_group="):
        data_group_of(optimizer, fake(0, 1, 2, 3))
    del model


def test_where_all_ranks_are_one_pipeline_none_has_other_data(monkeypatch) -> None:
    model, optimizer = announced(fake(0, 1))
    monkeypatch.setattr("scale_adascale.measurement.param_info.group_of", lambda given, *axes: fake(0, 1))
    assert data_group_of(optimizer, None) == Group()
    del model
