"""What has been equal on all ranks has to stay so; what each rank has for itself may be anything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from scale_core import DivergenceError
from scale_core.comm.group import group_of
from scale_core.consistency.contract import Contract
from scale_core.consistency.equal_values import EqualValues

Value = Callable[[int, int], float]  # of a rank, in a pass


def constant(rank: int, number: int) -> float:
    return 1.0


def flipped_constant(rank: int, number: int) -> float:
    return 2.0 if rank == 1 and number >= 4 else 1.0


def changing(rank: int, number: int) -> float:
    return number


def flipped_while_changing(rank: int, number: int) -> float:
    return number + (0.5 if rank == 1 and number == 4 else 0)


def statistic(rank: int, number: int) -> float:
    return number * (1.0 + rank)  # It begins alike.


def late_statistic(rank: int, number: int) -> float:
    return number * (1.0 + rank) if number >= 4 else 0.0  # On all ranks it changes.


def rare_event(rank: int, number: int) -> float:
    return 1.0 if rank == 1 and number >= 4 else 0.0  # A count of what happens on one rank.


def warm_up(rank: int, number: int) -> float:
    return number if number < 3 else number + rank  # The first batches are the same on all ranks.


def early_event(rank: int, number: int) -> float:
    return 1.0 if rank == 1 and number >= 2 else 0.0


EQUAL: list[Value] = [constant, changing]
OF_EACH_RANK: list[Value] = [statistic, late_statistic, early_event, rare_event, warm_up]
DIVERGED: list[Value] = [flipped_constant, flipped_while_changing]


def train(values: list[Value], dtype: torch.dtype = torch.float32) -> str:
    rank, equal, contract = dist.get_rank(), EqualValues(), Contract(group_of())
    named = [(value.__name__, torch.zeros(3, dtype=dtype)) for value in values]
    for number in range(6):
        for value, (_, tensor) in zip(values, named, strict=True):
            tensor.fill_(value(rank, number))
        try:
            equal.compare(named, contract, number)
        except DivergenceError as error:
            return f"{number}: {error}{error.__notes__}"
    return "nothing"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("value", DIVERGED)
def test_an_equal_value_that_changes_on_one_rank_is_an_error(value: Value) -> None:
    text = train([*EQUAL, value, *OF_EACH_RANK])
    assert text.startswith("4: step 4: 1 of ") and f"'{value.__name__}'" in text
    assert "pass check_replicas_every=0" in text


@pytest.mark.ranks(2)
def test_values_of_each_rank_and_counters_are_no_error() -> None:
    assert train([*EQUAL, *OF_EACH_RANK]) == "nothing"
    assert train(DIVERGED, dtype=torch.int64) == "nothing"


@pytest.mark.ranks(2)
def test_a_table_that_grows_on_one_rank_is_no_error() -> None:
    """As that of a cache, for a longer batch."""
    equal, contract, table = EqualValues(), Contract(group_of()), torch.arange(1.0, 5.0)
    for number in range(6):
        if number == 4 and dist.get_rank() == 1:
            table = torch.arange(1.0, 9.0)
        equal.compare([("table", table)], contract, number)


@pytest.mark.ranks(2)
def test_tensors_of_other_names_are_no_error() -> None:
    equal, contract = EqualValues(), Contract(group_of())
    for number in range(5):
        equal.compare([(f"of rank {dist.get_rank()}", torch.full((2,), float(number)))], contract, number)
