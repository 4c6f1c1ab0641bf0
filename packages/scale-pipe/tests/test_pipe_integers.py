"""Integers as users give them."""

import numpy
import pytest

from scale_pipe.integers import check_positive, plain_integer
from scale_pipe.schedules.classic import gpipe
from scale_pipe.schedules.registry import get_schedule


def test_integers_of_other_libraries_are_taken_for_chunks() -> None:
    assert [plain_integer(number) for number in (3, numpy.int64(3), True, 3.0, "3")] == [3, 3, None, None, None]
    taken = get_schedule("1f1b", 2, numpy.int64(4), None).num_micro_batches
    assert taken == 4 and type(taken) is int
    for wrong in (4.0, True):
        with pytest.raises(TypeError, match=f"chunks must be an integer, but is {wrong}"):
            get_schedule("1f1b", 2, wrong, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="chunks must be at least 1, but is 0"):
        get_schedule("1f1b", 2, 0, None)


def test_positive_numbers_come_back_as_those_of_python() -> None:
    (taken,) = check_positive(visits=numpy.int32(7))
    assert taken == 7 and type(taken) is int
    schedule = gpipe(2, numpy.int64(3))  # type: ignore[arg-type]
    assert type(schedule.num_micro_batches) is int and schedule == gpipe(2, 3)
