"""parallel_state.py: how a world of ranks stands in axes."""

from __future__ import annotations

import pytest

from scale_tp.parallel_state import AxisSizes, rank_groups


def test_the_model_axis_runs_fastest_and_the_data_axis_slowest() -> None:
    sizes = AxisSizes(data=2, pipeline=2, context=2, model=2)
    for axis, groups in {
        "model": [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
        "context": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
        "pipeline": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        "data": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    }.items():
        assert rank_groups(sizes, axis) == groups


def test_replicas_of_parts_of_a_sequence_have_equal_parameters() -> None:
    sizes = AxisSizes(data=2, pipeline=2, context=2, model=2)
    assert rank_groups(sizes, "data", "context") == [[0, 2, 8, 10], [1, 3, 9, 11], [4, 6, 12, 14], [5, 7, 13, 15]]
    sizes = AxisSizes(data=3, pipeline=1, context=1, model=2)
    assert rank_groups(sizes, "data", "context") == rank_groups(sizes, "data")


@pytest.mark.parametrize("sizes", [AxisSizes(3, 1, 2, 5), AxisSizes(1, 1, 1, 1), AxisSizes(1, 7, 1, 1)])
def test_along_each_axis_every_rank_is_in_one_group(sizes: AxisSizes) -> None:
    world = sizes.data * sizes.pipeline * sizes.context * sizes.model
    for name in AxisSizes._fields:
        groups = rank_groups(sizes, name)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {getattr(sizes, name)}
