"""Ranks that are killed or frozen anywhere in a step or a save: nothing is lost, and the survivors say who it was.

Of each fault: the class and the text of the error on every survivor, that no process and no temporary file is left,
that the last snapshot is the undisturbed run's, and that training goes on from it with the losses of the undisturbed
run to the bit.

Survivors of a killed rank raise at once: their limit is longer than the test may last, and no error is that of a limit.
Those of a frozen one raise at theirs, and say so.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_trainings import NEVER, SAVE_EVERY, SNAPSHOTS, STEPS, Ended, Whole, digest, ended, losses, train

import scale_core.testing.ranks
from scale_core.testing import run_ranks
from scale_core.testing.faults import Fault, kill_at, stop_at
from scale_snapshot import latest_snapshot

LIMIT = 6.0  # Seconds: T of the matrix, for the ranks that wait for a frozen one.


@dataclass(frozen=True)
class Case:
    """One fault, or several at once.

    Attributes:
        rows: Of the matrix, with ", " between them.
        kind: Of the training.
        num_ranks: In all.
        put: What happens.
        text: What every survivor's error says, as an expression.
        errors: Its class, by name.
        last: The step of the last snapshot afterwards.
    """

    rows: str
    kind: str
    num_ranks: int
    put: tuple[Fault, ...]
    text: str = ""
    errors: str = "ScaleDistributedError"
    last: int = 4

    def __str__(self) -> str:
        return f"{self.rows}: {self.kind} on {self.num_ranks}, " + " and ".join(map(str, self.put))


KILLED = "rank {}: no flight record: it has exited"
QUICK = (
    Case("2", "fsdp", 2, (kill_at("reduce_scatter", 1, 6),), r"with rank 1 .*" + KILLED.format(1)),
    Case("2", "oss", 2, (kill_at("reduce_scatter", 1, 6),), KILLED.format(1)),
    Case("6", "tp", 2, (kill_at("all_gather", 1, 5, during="forward"),), r"rank 1", "TransferError"),
    Case("116", "moe", 2, (kill_at("all_to_all", 1, 5, during="forward"),), r"rank 1", "TransferError"),
    Case("18", "fsdp", 2, (stop_at("all_gather", 1, 5, during="forward"),), r"rank 1"),
)
WHOLE = (
    Case("1", "fsdp", 2, (kill_at("all_gather", 1, 5, during="forward"),), r"with rank 1 .*" + KILLED.format(1)),
    Case("1", "fsdp", 3, (kill_at("all_gather", 2, 5, during="backward"),), KILLED.format(2)),
    Case("2", "oss", 3, (kill_at("all_gather", 1, 6),), r"rank 1"),
    Case("3, 63", "fsdp", 2, (kill_at("optimizer.step", 1, 5),), KILLED.format(1)),
    Case("3, 63", "oss", 2, (kill_at("optimizer.step", 1, 5),), r"rank 1"),
    Case("3, 63", "tp", 2, (kill_at("optimizer.step", 1, 5),), r"rank 1", "TransferError"),
    Case("3, 63", "moe", 2, (kill_at("optimizer.step", 1, 5),), r"rank 1", "TransferError"),
    Case("3, 63", "pipe", 2, (kill_at("optimizer.step", 1, 5),), KILLED.format(1)),
    Case("5", "pipe", 4, (kill_at("pipe.send", 1, 5, detail="micro-batch 2"),), KILLED.format(1)),
    Case("5", "pipe", 4, (kill_at("pipe.receive", 3, 5, detail="micro-batch 2"),), KILLED.format(3)),
    Case("6", "tp", 2, (kill_at("all_gather", 0, 5, during="backward"),), r"rank 0", "TransferError"),
    Case("7", "fsdp", 3, (kill_at("reduce_scatter", 0, 5),), KILLED.format(0)),
    Case("7", "oss", 3, (kill_at("reduce_scatter", 0, 5),), r"rank 0"),
    Case("7", "tp", 3, (kill_at("reduce_scatter", 0, 5),), r"rank 0", "TransferError"),
    Case("7", "moe", 3, (kill_at("all_to_all", 0, 5, during="backward"),), r"rank 0", "TransferError"),
    Case("7", "pipe", 4, (kill_at("pipe.send", 0, 5, detail="micro-batch 2"),), r"rank 0"),
    Case("8", "fsdp", 4, (kill_at("reduce_scatter", 1, 5), kill_at("reduce_scatter", 2, 5)), r"rank [12]"),
    Case("8", "oss", 4, (kill_at("reduce_scatter", 1, 5), kill_at("reduce_scatter", 2, 5)), r"rank [12]"),
    Case(
        "8", "tp", 4, (kill_at("reduce_scatter", 1, 5), kill_at("reduce_scatter", 2, 5)), r"rank [12]", "TransferError"
    ),
    Case("8", "moe", 4, (kill_at("all_to_all", 1, 5), kill_at("all_to_all", 2, 5)), r"rank [12]", "TransferError"),
    Case("8", "pipe", 4, (kill_at("optimizer.step", 1, 5), kill_at("optimizer.step", 2, 5)), r"rank [12]"),
    Case("18", "fsdp", 3, (stop_at("reduce_scatter", 0, 5),), r"rank 0"),
    Case("18", "oss", 2, (stop_at("reduce_scatter", 1, 5),), r"rank 1"),
    Case("18", "tp", 2, (stop_at("all_gather", 1, 5),), r"rank 1", "TransferError"),
    Case("18", "pipe", 2, (stop_at("pipe.send", 1, 5),), r"rank 1"),
    Case("18", "moe", 2, (stop_at("all_to_all", 1, 5),), r"rank 1", "TransferError"),
    Case("116", "moe", 2, (kill_at("all_to_all", 0, 5, during="backward"),), r"rank 0", "TransferError"),
)
SAVING = (
    Case("37", "fsdp", 2, (kill_at("snapshot.room", 0, 4),), last=2),
    Case("37", "fsdp", 2, (kill_at("snapshot.tensor", 0, 4),), last=2),
    Case("37", "fsdp", 2, (kill_at("snapshot.tensor", 1, 4),), last=2),
    Case("38", "fsdp", 2, (kill_at("snapshot.written", 1, 4),), last=2),
    Case("39", "fsdp", 2, (kill_at("snapshot.manifest", 0, 4),), last=2),
    Case("40", "fsdp", 2, (kill_at("snapshot.renamed", 0, 4),), last=4),
)


@pytest.fixture(autouse=True)
def _survivors_have_time_to_say_what_they_saw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_core.testing.ranks, "_GRACE_SECONDS", NEVER)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check(case: Case, folder: Path, whole: Whole) -> None:
    expected = whole(case.kind, case.num_ranks)
    frozen = any(fault.action == "stop" for fault in case.put)
    limit = LIMIT if frozen else NEVER
    with pytest.raises(Exception) as raised:  # noqa: PT011  # Which rank's error it is depends on who ends first.
        run_ranks(train, case.num_ranks, case.kind, str(folder), case.put, limit)

    told, victims = ended(folder), {fault.rank for fault in case.put}
    assert told.keys() == set(range(case.num_ranks)) - victims, raised.value
    for rank, error in told.items():
        assert_names_the_culprit(case, rank, error)
    at_the_limit = [rank for rank, error in told.items() if "no answer within" in error.text]
    assert bool(at_the_limit) == frozen, told
    for path in folder.glob("pid-*"):
        assert not is_alive(int(path.read_text())), path.name
    newest = latest_snapshot(folder / SNAPSHOTS)
    assert newest is not None and newest.name == f"step-{case.last:08d}"
    assert digest(folder, case.last) == digest(expected, case.last)

    assert run_ranks(train, case.num_ranks, case.kind, str(folder)) == [case.last] * case.num_ranks
    assert losses(folder) == losses(expected)
    names = sorted(path.name for path in (folder / SNAPSHOTS).iterdir())
    assert names == [f"step-{step:08d}" for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)], names
    assert digest(folder, STEPS) == digest(expected, STEPS)


def assert_names_the_culprit(case: Case, rank: int, error: Ended) -> None:
    assert error.kind == case.errors, f"rank {rank}: {error}"
    assert re.search(case.text, error.text, re.DOTALL), f"rank {rank}: {error}"
    assert "start from the last checkpoint" in error.text, error
    assert f"step-{case.last:08d}" in error.text, error


@pytest.mark.fault(2, 6, 18, 116)
@pytest.mark.parametrize("case", QUICK, ids=str)
def test_nothing_is_lost_with_a_rank(case: Case, tmp_path: Path, whole: Whole) -> None:
    check(case, tmp_path, whole)


@pytest.mark.fault(1, 2, 3, 5, 6, 7, 8, 18, 63, 116)
@pytest.mark.soak
@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_nothing_is_lost_with_a_rank_wherever_it_is(case: Case, tmp_path: Path, whole: Whole) -> None:
    check(case, tmp_path, whole)


@pytest.mark.fault(37, 38, 39, 40)
@pytest.mark.soak
@pytest.mark.parametrize("case", SAVING, ids=str)
def test_nothing_is_lost_with_a_rank_that_is_saving(case: Case, tmp_path: Path, whole: Whole) -> None:
    check(case, tmp_path, whole)
