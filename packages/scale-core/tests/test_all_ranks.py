import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, group_of
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.errors import ScaleDistributedError, set_last_snapshot
from scale_core.testing import run_ranks
from scale_core.testing.ranks import scaled_by_load


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


@pytest.mark.ranks(2)
def test_every_rank_gets_what_all_did_and_what_the_first_did() -> None:
    rank, calls = dist.get_rank(), list[int]()
    together = CollectiveCall(group_of(), "baking", BakingError)

    def speak() -> str:
        calls.append(rank)
        return f"rank {rank}'s word"

    assert together.rank0(speak) == "rank 0's word" and calls == ([] if rank else [0])
    own: Callable[[], int] = together.each_rank(lambda: partial(getattr, rank, "real"))
    assert own() == rank
    assert together.all_ranks(lambda: rank * 10) == [0, 10]


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "failing, text",
    [
        ([1], "baking failed on rank 1 of 3: ValueError: no flour on 1"),
        ([0, 2], "baking failed on rank 0 of 3 (and so did ranks 2): ValueError: no flour on 0"),
    ],
)
def test_the_first_failure_is_raised_on_all_with_their_count(failing: list[int], text: str) -> None:
    assert fail_on(failing, False) == (text, "ValueError")


@pytest.mark.ranks(2)
def test_an_error_that_does_not_unpickle_travels_as_its_text() -> None:
    error = "Burnt" if dist.get_rank() == 1 else "RuntimeError"
    text = "Burnt: bread after 1 minutes" if dist.get_rank() == 1 else "RuntimeError: Burnt: bread after 1 minutes"
    assert fail_on([1], True) == (f"baking failed on rank 1 of 2: {text}", error)


def lose_a_rank(folder: Path) -> ScaleDistributedError | None:
    """The last rank leaves in the middle of what all do together."""
    group = group_of()
    set_last_snapshot("runs/1/step-00000012")
    call = CollectiveCall(group, "saving runs/1/step-00000013", BakingError, limit_seconds=2.0)
    call.all_ranks(lambda: None)
    if group.rank == group.size - 1:
        while len(list(folder.iterdir())) < group.size - 1:
            time.sleep(0.02)
        return None
    with pytest.raises(ScaleDistributedError) as caught:
        call.all_ranks(lambda: None)
    (folder / str(group.rank)).touch()
    return caught.value


def take_long(limit: float, reports: bool) -> tuple[list[int], float]:
    """The last rank takes three times the limit."""
    group = group_of()

    def act(progress: Callable[[int], None]) -> int:
        for _ in range(30 if group.rank == group.size - 1 else 0):
            time.sleep(limit / 10)
            if reports:
                progress(1)
        return group.rank

    call = CollectiveCall(group, "saving runs/1/step-00000013", BakingError, limit_seconds=limit)
    began = time.monotonic()
    return call.all_ranks_with_progress(act), (time.monotonic() - began) / limit


@pytest.mark.fault(19)
@pytest.mark.ranks(3)
def test_a_slow_rank_is_waited_for_while_it_reports_progress() -> None:
    results, limits = take_long(scaled_by_load(0.5), reports=True)
    assert results == [0, 1, 2] and limits > 2


@pytest.mark.ranks(2)
def test_without_progress_it_is_named_at_the_limit() -> None:
    exchange([], group_of())  # The ranks have met before.
    with pytest.raises(ScaleDistributedError) as caught:
        take_long(scaled_by_load(0.5), reports=False)
    text = "saving runs/1/step-00000013 failed: exchange with rank 1 failed: no answer within"
    assert (
        str(caught.value).startswith(text) if dist.get_rank() == 0 else "What each rank did last:" in str(caught.value)
    )


@pytest.mark.ranks(2)
def test_ranks_that_do_different_things_hear_what() -> None:
    group = group_of()
    text = "the ranks do different things: rank 0: baking loaf 0; rank 1: baking loaf 1. All ranks have to make this"
    with pytest.raises(ScaleDistributedError, match=text):
        CollectiveCall(group, f"baking loaf {group.rank}", BakingError).all_ranks(lambda: None)
    dist.barrier()  # The group still works.


def test_a_rank_that_does_not_come_is_named_within_the_limit(tmp_path: Path) -> None:
    survivor = run_ranks(lose_a_rank, 2, tmp_path)[0]
    assert survivor is not None
    first, *records, last = str(survivor).splitlines()
    assert first == "saving runs/1/step-00000013 failed: exchange with rank 1 failed: no answer within 2 s"
    assert any(line.startswith("  rank 1: no flight record") for line in records)
    assert last.endswith("start from the last checkpoint, runs/1/step-00000012")
    assert (survivor.rank, survivor.peer, survivor.op) == (0, 1, "saving runs/1/step-00000013")


def test_a_world_of_one_needs_no_torch_distributed() -> None:
    together = CollectiveCall(Group(), "baking", BakingError)
    assert together.all_ranks(lambda: 5) == [5]
    with pytest.raises(BakingError, match="baking failed: ZeroDivisionError"):
        together.rank0(lambda: 1 // 0)
