"""Where stages stand."""

import numpy
import pytest

from scale_pipe import Placement
from scale_pipe.distributed.building import schedule_for
from scale_pipe.schedules.placement import plain_integer


def test_placements_are_those_of_the_table() -> None:
    assert Placement.loop(4, 2).stages_of == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert Placement.wave(4).stages_of == ((0, 7), (1, 6), (2, 5), (3, 4))
    assert Placement.wave(4, 4).stages_of == ((0, 7, 8, 15), (1, 6, 9, 14), (2, 5, 10, 13), (3, 4, 11, 12))


def test_a_placement_says_its_shape() -> None:
    shapes = [Placement.loop(3), Placement.loop(3, 2), Placement.wave(3), Placement.wave(3, 4), Placement((0, 0, 1))]
    assert [one.shape for one in shapes] == ["loop", "loop", "V", "wave", "ranks 0 0 1"]


@pytest.mark.parametrize(
    "rank_of, told", [((), "at least one stage"), ((0, 2), "rank 1 holds none"), ((0, -1), "there is rank -1")]
)
def test_a_placement_without_a_stage_for_each_rank_is_refused(rank_of: tuple[int, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Placement(rank_of)


def test_numbers_are_positive_integers() -> None:
    with pytest.raises(ValueError, match="num_ranks must be at least 1, but is 0"):
        Placement.wave(0)
    with pytest.raises(TypeError, match=r"stages_per_rank must be an integer, but is 2\.0"):
        Placement.loop(4, 2.0)  # type: ignore[arg-type]


def test_integers_of_other_libraries_are_taken_for_chunks() -> None:
    assert [plain_integer(number) for number in (3, numpy.int64(3), True, 3.0, "3")] == [3, 3, None, None, None]
    taken = schedule_for("1f1b", 2, numpy.int64(4), None).num_micro_batches
    assert taken == 4 and type(taken) is int
    for wrong in (4.0, True):
        with pytest.raises(TypeError, match=f"chunks must be an integer, but is {wrong}"):
            schedule_for("1f1b", 2, wrong, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunks must be at least 1, but is 0"):
        schedule_for("1f1b", 2, 0, None)
