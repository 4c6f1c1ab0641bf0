"""How often a number counts that a rank measures, and which ranks may divide a parameter."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.param_info import Weights, splits_of, weights_of
from scale_core.autograd_hooks import mark_reported
from scale_core.comm.group import Group
from scale_core.shard import Axis, Held, Shard, mark


def group(*ranks: int) -> Group:
    return Group(0, len(ranks), None, "fake", ranks)


def piece(*axes: Axis, reported: bool = False, counted: bool = True) -> torch.Tensor:
    param = torch.ones(2)
    mark(param, Shard("up.weight", (8,), 0, 2, axes, counted=counted))
    if reported:
        mark_reported([param])
    return param


WORLD, COLUMN, ROW = group(0, 1, 2, 3), group(0, 2), group(0, 1)
NOBODY = group(0)


@pytest.mark.parametrize(
    "param, data, model, expected",
    [
        (torch.ones(2), WORLD, NOBODY, Weights(1.0, 0.25)),
        (piece(Axis(WORLD, Held.SHARD), reported=True), WORLD, NOBODY, Weights(1.0, 1.0)),
        (
            piece(Axis(COLUMN, Held.SHARD), Axis(ROW, Held.REPLICATE), reported=True),
            WORLD,
            NOBODY,
            Weights(1.0, 0.5),
        ),
        (piece(Axis(ROW, Held.SHARD)), COLUMN, ROW, Weights(1.0, 0.5)),
        (piece(Axis(ROW, Held.REPLICATE)), COLUMN, ROW, Weights(0.5, 0.5)),
        (piece(Axis(COLUMN, Held.SHARD), Axis(ROW, Held.SHARD), reported=True), COLUMN, ROW, Weights(1.0, 1.0)),
        (piece(Axis(ROW, Held.SHARD), counted=False), COLUMN, ROW, Weights(0.0, 0.5)),
    ],
)
def test_each_element_counts_once(param, data, model, expected):
    assert weights_of(param, param, data, model) == expected


def test_what_says_nothing_of_a_split_is_alike_there():
    assert weights_of(torch.ones(2), torch.ones(2), COLUMN, ROW, [ROW]) == Weights(0.5, 0.5)


def test_the_directions_beside_data_are_found():
    params = [piece(Axis(ROW, Held.SHARD)), piece(Axis(COLUMN, Held.SHARD)), torch.ones(1)]
    assert splits_of(params, COLUMN) == {(0, 1): ROW}


@pytest.mark.parametrize(
    "param",
    [
        piece(Axis(ROW, Held.SHARD)),  # A tensor parallel layer, under DistributedDataParallel or alone.
        piece(Axis(COLUMN, Held.SHARD), Axis(ROW, Held.SHARD), reported=True),  # The same, sharded.
    ],
)
def test_ranks_of_tensor_parallelism_are_not_taken_for_those_with_other_data(param):
    with pytest.raises(ValueError, match=r"'up\.weight' is divided over.*too small a gain.*process_group=the data"):
        weights_of(param, param, WORLD, NOBODY)
