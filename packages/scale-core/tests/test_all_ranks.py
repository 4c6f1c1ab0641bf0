from collections.abc import Callable
from functools import partial

import pytest
import torch.distributed as dist

from scale_core.comm.group import Group, group_of
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.testing import run_ranks


class BakingError(RuntimeError):
    pass


class Burnt(Exception):
    def __init__(self, what: str, minutes: int) -> None:
        super().__init__(f"{what} after {minutes} minutes")


def fail_on(failing: list[int], odd: bool) -> tuple[str, str]:
    rank = dist.get_rank()

    def act() -> int:
        if rank in failing:
            raise Burnt("bread", rank) if odd else ValueError(f"no flour on {rank}")
        return rank

    with pytest.raises(BakingError) as caught:
        CollectiveCall(group_of(), "baking", BakingError).all_ranks(act)
    return str(caught.value), type(caught.value.__cause__).__name__


def succeed() -> tuple[list[int], object, list[int]]:
    rank = dist.get_rank()
    together = CollectiveCall(group_of(), "baking", BakingError)
    calls: list[int] = []

    def speak() -> str:
        calls.append(rank)
        return f"rank {rank}'s word"

    first = together.rank0(speak)
    own: Callable[[], int] = together.each_rank(lambda: partial(getattr, rank, "real"))
    assert own() == rank
    return together.all_ranks(lambda: rank * 10), first, calls


def test_every_rank_gets_what_all_did_and_what_the_first_did() -> None:
    assert run_ranks(succeed, 2) == [([0, 10], "rank 0's word", [0]), ([0, 10], "rank 0's word", [])]


def test_one_rank_s_failure_is_raised_on_all() -> None:
    expected = ("baking failed on rank 1 of 3: ValueError: no flour on 1", "ValueError")
    assert run_ranks(fail_on, 3, [1], False) == [expected] * 3


def test_several_failures_are_counted() -> None:
    expected = ("baking failed on rank 0 of 3 (and so did ranks 2): ValueError: no flour on 0", "ValueError")
    assert run_ranks(fail_on, 3, [0, 2], False) == [expected] * 3


def test_an_error_that_does_not_unpickle_travels_as_its_text() -> None:
    other, own = run_ranks(fail_on, 2, [1], True)
    assert other == ("baking failed on rank 1 of 2: RuntimeError: Burnt: bread after 1 minutes", "RuntimeError")
    assert own == ("baking failed on rank 1 of 2: Burnt: bread after 1 minutes", "Burnt")


def test_a_world_of_one_needs_no_torch_distributed() -> None:
    together = CollectiveCall(Group(), "baking", BakingError)
    assert together.all_ranks(lambda: 5) == [5]
    with pytest.raises(BakingError, match="baking failed: ZeroDivisionError"):
        together.rank0(lambda: 1 // 0)
