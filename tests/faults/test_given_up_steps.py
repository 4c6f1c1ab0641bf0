"""Ranks that fail, are late or run out of data and stay alive: all hear the same, and what can go on goes on.

Where nobody is to wait, the limit is longer than a test may last. Where a rank waits for one that does not come, the
limit is five seconds, and the error is that of the limit.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from fault_trainings import (
    KINDS,
    NEVER,
    OVER_DDP,
    SNAPSHOTS,
    STEPS,
    Block,
    ExpertBlock,
    Whole,
    batch_of,
    build,
    digest,
    ended,
    losses,
    say_how_it_ended,
    train,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import scale_core.testing.ranks
from scale_core.errors import ScaleDistributedError, StepError
from scale_core.testing import faults, run_ranks
from scale_core.testing.faults import Fault, delay_at, enospc_at, raise_at
from scale_fsdp import fully_shard
from scale_snapshot import latest_snapshot, save_snapshot

FSDP_QUICKLY = ["fsdp", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("oss", "tp", "pipe", "moe"))]


def assert_same_run(folder: Path, expected: Path) -> None:
    assert losses(folder) == losses(expected)
    assert digest(folder, STEPS) == digest(expected, STEPS)
    assert not [path.name for path in (folder / SNAPSHOTS).iterdir() if ".tmp" in path.name]


# In the first two steps all ranks compare each event; later they find out by another way.
RAISED = [
    ("fsdp", 2, raise_at("user.forward", 1, 5, occurrence=3)),
    ("oss", 2, raise_at("user.forward", 1, 5, occurrence=3)),
    ("pipe", 2, raise_at("user.forward", 1, 5, occurrence=6)),
    ("fsdp", 3, raise_at("user.forward", 2, 1, occurrence=2)),
    ("fsdp", 2, raise_at("user.forward", 0, 6, occurrence=4)),
    ("oss", 3, raise_at("user.forward", 0, 2, occurrence=4)),
]


@pytest.mark.fault(11)
@pytest.mark.parametrize(
    ("kind", "num_ranks", "fault"),
    [*RAISED[:1], *(pytest.param(*case, marks=pytest.mark.soak) for case in RAISED[1:])],
    ids=str,
)
def test_all_hear_what_one_rank_raises_and_run_the_step_again(
    kind: str, num_ranks: int, fault: Fault, tmp_path: Path, whole: Whole
) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    with pytest.raises((StepError, faults.InjectedError), match="injected"):
        run_ranks(train, num_ranks, kind, str(first), [fault])
    told = ended(first)
    assert told.keys() == set(range(num_ranks))
    for rank, error in told.items():
        if kind == "pipe":
            assert error.kind == "StageError" and "InjectedError" in error.text, error
        elif rank == fault.rank:
            assert error.kind == "InjectedError", error
        else:
            assert error.kind == "StepError" and f"rank {fault.rank} failed" in error.text, error
        assert "injected" in error.text and error.step == fault.step
    assert run_ranks(train, num_ranks, kind, str(again), [fault], NEVER, None, True) == [0] * num_ranks
    assert_same_run(again, whole(kind, num_ranks))


LATE = [
    ("fsdp", "reduce_scatter"),
    ("oss", "reduce_scatter"),
    ("tp", "all_gather"),
    ("pipe", "pipe.send"),
    ("moe", "all_to_all"),
]


@pytest.mark.fault(19, place="rank 1 is late by 0.5 s in step 3")
@pytest.mark.soak
@pytest.mark.parametrize(("kind", "point"), LATE)
def test_a_rank_that_is_late_changes_nothing(kind: str, point: str, tmp_path: Path, whole: Whole) -> None:
    run_ranks(train, 2, kind, str(tmp_path), [delay_at(point, 1, 3, seconds=0.5)])
    assert_same_run(tmp_path, whole(kind, 2))


@pytest.mark.fault(42, techniques=("fsdp",), place="rank 0 in the save of step 4")
@pytest.mark.parametrize("point", ["snapshot.room", "snapshot.tensor"])
def test_a_full_disk_leaves_out_a_snapshot_and_training_goes_on(point: str, tmp_path: Path, whole: Whole) -> None:
    told = [enospc_at(point, 0, 4)]
    with pytest.raises(Exception, match=r"failed on rank 0 of 2: OSError: \[Errno 28\] No space left"):
        run_ranks(train, 2, "fsdp", str(tmp_path), told)
    assert {error.kind for error in ended(tmp_path).values()} == {"SnapshotError"}
    assert len(ended(tmp_path)) == 2
    newest = latest_snapshot(tmp_path / SNAPSHOTS)
    assert newest is not None and newest.name == "step-00000002"
    assert sorted(path.name for path in (tmp_path / SNAPSHOTS).iterdir()) == ["step-00000002"]
    assert run_ranks(train, 2, "fsdp", str(tmp_path), told, NEVER, None, True) == [2, 2]
    assert not (tmp_path / SNAPSHOTS / "step-00000004").exists()
    assert_same_run(tmp_path, whole("fsdp", 2))


@pytest.mark.fault(20, place="rank 1 has no batch for step 8; the limit is 5 s")
@pytest.mark.parametrize("kind", FSDP_QUICKLY)
def test_a_rank_that_runs_out_of_data_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_core.testing.ranks, "_GRACE_SECONDS", 2.0)
    with pytest.raises(ScaleDistributedError, match="rank 1"):
        run_ranks(train, 2, kind, str(tmp_path), [], 5.0, {1: STEPS - 1})
    told = ended(tmp_path)
    assert told.keys() == {0} and told[0].step == STEPS
    if kind in ("fsdp", "oss"):
        assert "skips a batch, an evaluation or a checkpoint" in told[0].text
    assert "with rank 1 failed" in told[0].text and "start from the last checkpoint" in told[0].text


def out_of_memory(kind: str) -> str:
    """Rank 1 may have no more memory than it has, and asks for 64 GB in a forward; the first error of each rank."""
    training = build(kind, NEVER)
    training.step(0)
    plain = Block.forward

    def greedy(block: Block, x: Tensor) -> Tensor:
        if dist.get_rank() == 1 and block.index == 3:
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            limit = pages * resource.getpagesize() + (64 << 20)
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
            try:
                torch.empty(1 << 34)
            finally:
                resource.setrlimit(resource.RLIMIT_AS, before)
        return plain(block, x)

    text = ""
    Block.forward = greedy  # type: ignore[method-assign]
    for step in (1, 2, 3):
        try:
            training.step(step)
        except (RuntimeError, MemoryError) as error:
            text = text or f"{type(error).__name__}: {error}"
            Block.forward = plain  # type: ignore[method-assign]
            if kind == "tp":
                break
    return text


@pytest.mark.fault(13, place="rank 1 in the forward of the last block")
@pytest.mark.skipif(sys.platform != "linux", reason="limits the memory of a process as Linux does")
@pytest.mark.parametrize("kind", ["fsdp", "oss", "tp", "pipe"])
def test_a_rank_without_memory_says_how_much_it_asked_for_to_all(kind: str) -> None:
    first, second = run_ranks(out_of_memory, 2, kind)
    asked = str(4 << 34)
    assert "allocate memory" in second and asked in second
    told = {"pipe": "StageError: ", "tp": "TransferError: "}.get(kind, "StepError: ")
    assert first.startswith(told) and asked in first
    assert ("rank 1: raised RuntimeError" if kind == "tp" else "rank 1") in first


class Rows(Dataset[Tensor]):
    """Kills the worker that reads the third row."""

    def __init__(self, kills: bool) -> None:
        self.kills = kills

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        if self.kills and index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def loader_loses_a_worker(kind: str, folder: str) -> None:
    rank = dist.get_rank()
    training = build(kind, NEVER)
    try:
        for step, _ in enumerate(DataLoader(Rows(kills=rank == 1), batch_size=1, num_workers=1)):
            training.step(step)
    except Exception as error:
        say_how_it_ended(Path(folder), error)
        if rank == 1:
            os._exit(1)  # As a program does that ends by this error; nobody is left to meet at the end.
        raise


@pytest.mark.fault(14, place="rank 1's worker is killed at the third batch")
@pytest.mark.parametrize("kind", [*FSDP_QUICKLY, *(pytest.param(kind, marks=pytest.mark.soak) for kind in OVER_DDP)])
def test_a_killed_worker_of_a_loader_is_named(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_core.testing.ranks, "_GRACE_SECONDS", NEVER)
    with pytest.raises(Exception, match=r"rank 1"):
        run_ranks(loader_loses_a_worker, 2, kind, str(tmp_path))
    (of_0, of_1) = (ended(tmp_path)[rank] for rank in range(2))
    # torch's loader hears of it by a signal, which has the pid, or by the worker's queue, whichever is first.
    by_signal = of_1.kind == "RuntimeError" and re.search(r"DataLoader worker \(pid.* \d+\)", of_1.text)
    assert by_signal or of_1.kind == "ConnectionResetError", of_1
    assert "no answer within" not in of_0.text
    if kind in OVER_DDP:  # What waits there is torch's reducer; its error is torch's own.
        assert of_0.kind in ("RuntimeError", "DistBackendError") and re.search("(closed|reset) by peer", of_0.text), (
            of_0
        )
    else:
        assert of_0.kind == ("TransferError" if kind in ("tp", "moe") else "ScaleDistributedError"), of_0
        assert "with rank 1" in of_0.text and "start from the last checkpoint" in of_0.text, of_0


def validates(kind: str) -> str:
    """Rank 1 has one batch less to validate with, and goes on to the next step."""
    training = build(kind, 5.0, check_inputs=True)
    training.step(0)
    try:
        losses = [training.evaluate(100 + number) for number in range(3 - dist.get_rank())]
        losses.append(float.fromhex(training.step(1)))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return losses[-1].hex()


@pytest.mark.fault(21, place="rank 1 evaluates two batches of three; the limit is 5 s")
@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_shorter_validation_is_an_error_or_changes_nothing(kind: str) -> None:
    told = run_ranks(validates, 2, kind)
    if kind == "oss":  # A forward communicates nothing there: ranks may validate what they like.
        assert told == run_ranks(validates_nothing, 2)
        return
    for text in told:
        if kind == "fsdp":
            assert text.startswith(("ContractError: ", "ScaleDistributedError: ")) and "rank 1" in text, text
        elif kind == "tp":
            assert text.startswith("DivergenceError: ") and "rank 1" in text, text
        else:
            assert text.startswith("StageError: ") and "rank 1 began a step with pipe.step" in text, text


def validates_nothing() -> str:
    training = build("oss", NEVER)
    training.step(0)
    return training.step(1)


@pytest.mark.fault(11, place="rank 1 raises in the third block of step 5, with experts it ends")
@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("tp", ["rank 1: raised InjectedError: injected", "start from the last"]),
        ("moe", ["with rank 1 failed: it has closed the connection"]),
    ],
)
def test_a_rank_that_raises_without_a_step_to_give_up_is_named(
    kind: str, words: list[str], tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale_core.testing.ranks, "_GRACE_SECONDS", NEVER)
    with pytest.raises((ScaleDistributedError, faults.InjectedError)):
        run_ranks(train, 2, kind, str(tmp_path), [raise_at("user.forward", 1, 5, occurrence=3)])
    told = ended(tmp_path)
    assert told[1].kind == "InjectedError" and told[0].kind == "TransferError"
    assert all(each in told[0].text for each in words)
    assert told[0].step == told[1].step == 5
    assert run_ranks(train, 2, kind, str(tmp_path)) == [4, 4]
    assert_same_run(tmp_path, whole(kind, 2))


def raises_with_sharded_experts() -> str:
    """Rank 1 raises in a unit of `fully_shard` with experts, for whose tokens rank 0 waits then."""
    group = cast(Any, dist.new_group(timeout=timedelta(seconds=5)))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    torch.manual_seed(0)
    blocks = nn.Sequential(*(ExpertBlock(index, group) for index in range(4)))
    for block in blocks:
        fully_shard(block.moe.experts, cast(Any, alone))  # type: ignore[union-attr]
        fully_shard(block, group)
    fully_shard(blocks, group)
    x, _ = batch_of(0, dist.get_rank())
    blocks(x).square().mean().backward()
    # torch says that the unit's own error was silenced, since the injected one is raised.
    warnings.filterwarnings("ignore", "module forward hook", UserWarning)
    with faults.inject(raise_at("user.forward", 1, occurrence=3)):
        try:
            blocks(x).square().mean().backward()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.fault(11, techniques=("moe",), place="rank 1 raises in the third block of step 2; the limit is 5 s")
@pytest.mark.soak
def test_with_sharded_experts_an_error_is_heard_at_the_limit() -> None:
    first, second = run_ranks(raises_with_sharded_experts, 2)
    # Rank 1 waits for its next unit. The limit of one passes first, which closes the connection of the other.
    assert re.match("TransferError: all_to_all with rank 1 failed: (no answer within 5 s|it has closed)", first), first
    assert second.startswith("InjectedError: injected"), second


def only_rank_0_saves(folder: str) -> None:
    training, rank = build("fsdp", 5.0), dist.get_rank()
    training.step(0)
    try:
        if rank == 0:
            state = training.model[0].up.weight.detach().clone()  # type: ignore[index]
            save_snapshot(folder, 1, {"weight": state}, training.group)  # type: ignore[arg-type]
        else:
            training.step(1)
    except Exception as error:
        say_how_it_ended(Path(folder), error)
        raise


@pytest.mark.fault(30, techniques=("fsdp",), place="rank 0 saves while rank 1 steps; the limit is 5 s")
def test_a_save_on_one_rank_alone_is_an_error_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_core.testing.ranks, "_GRACE_SECONDS", NEVER)
    with pytest.raises(ScaleDistributedError):
        run_ranks(only_rank_0_saves, 2, str(tmp_path))
    for rank, other in ((0, "rank 1"), (1, "rank 0")):
        error = ended(tmp_path)[rank]
        assert error.kind == "ScaleDistributedError" and other in error.text, error
        if rank == 0:
            assert "  rank 1: elsewhere: " in error.text and "failed in the comparison of replicas" in error.text
    assert not list(tmp_path.glob("step-*"))


def decide_together(own: list[float]) -> list[bool]:
    """The recipe of the guide: rank 0 decides from its own loss, and the others do what it does."""
    decisions = []
    for loss in own:
        decision = torch.tensor(loss < 0.5)
        dist.broadcast(decision, 0)
        decisions.append(bool(decision))
    return decisions


@pytest.mark.fault(31)
@pytest.mark.ranks(2)
def test_rank_0_decides_from_a_metric_for_all() -> None:
    assert decide_together([[0.4, 0.6], [0.6, 0.4]][dist.get_rank()]) == [True, False]
