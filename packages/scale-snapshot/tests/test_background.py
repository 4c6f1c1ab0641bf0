"""Saves in the background: what they hold, what they need, and that none fails unheard."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import torch
import torch.distributed as dist
from sharded_by_hand import Model, adam, cut, train
from torch import Tensor, nn

import scale_snapshot.saving
import scale_snapshot.snapshot
from scale_core.comm.group import group_of
from scale_core.shard import on_local_tensors
from scale_core.testing import RankError, run_ranks
from scale_snapshot import SnapshotError, async_save, background, latest, load, save, staging

pytestmark = pytest.mark.local_tensors

T = TypeVar("T")

LONG = 60.0  # Longer than any test waits.


def at(point: str, act: Callable[[], object]) -> None:
    """Calls `act` when a save of this process reaches a stage."""
    vars(scale_snapshot.snapshot)["at_stage"] = lambda now, path: act() if now == point else None


@pytest.fixture(autouse=True)
def stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets stages back after a test."""
    monkeypatch.setattr(scale_snapshot.snapshot, "at_stage", scale_snapshot.snapshot.at_stage)


def trained(num_steps: int) -> dict[str, Any]:
    model = cut(Model(), dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else Model()
    objects: dict[str, Any] = {"model": model, "optimizer": adam(model)}
    train(model, objects["optimizer"], num_steps)
    return objects


@on_local_tensors
def save_and_train_on(folder: Path) -> None:
    objects = trained(3)
    held = threading.Event()
    at("room", lambda: held.wait(LONG))
    saving = async_save(folder, 3, objects, extra={"position": 7})
    train(objects["model"], objects["optimizer"], 5, first=3)  # While nothing is written yet.
    assert not saving.done()
    with pytest.raises(TimeoutError, match=r"is still being written after 0\.01 s"):
        saving.wait(0.01)
    held.set()
    assert saving.wait() == saving.path == folder / "step-00000003"
    assert saving.done()


@on_local_tensors
def check_it_is_of_step_3(folder: Path) -> None:
    objects, expected = trained(0), trained(3)
    assert load(folder, objects).extra == {"position": 7}
    for each in (objects, expected):
        train(each["model"], each["optimizer"], 1, first=3)
    for got, wanted in zip(objects["model"].parameters(), expected["model"].parameters(), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_what_is_trained_meanwhile_does_not_reach_the_files(tmp_path: Path, num_ranks: int) -> None:
    if num_ranks:
        run_ranks(save_and_train_on, num_ranks, tmp_path)
        run_ranks(check_it_is_of_step_3, 3, tmp_path)
    else:
        save_and_train_on(tmp_path)
    check_it_is_of_step_3(tmp_path)


def test_a_second_save_waits_for_the_first_and_old_ones_go(tmp_path: Path) -> None:
    objects = trained(1)
    savings = [async_save(tmp_path, number, objects, keep=2) for number in (1, 2, 3)]
    assert savings[0].done() and savings[1].done()
    savings[2].wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    size = sum(tensor.nbytes for tensor in objects["model"].state_dict().values())
    assert staging.kept_bytes() >= size


def big_model() -> dict[str, Any]:
    torch.manual_seed(0)
    return {"model": cut(nn.Linear(2048, 2048), dist.get_rank(), dist.get_world_size())}


def peak_bytes(write: Callable[[], object]) -> int:
    """How much more memory the process held at most while it wrote; tells it from the state of its pages."""
    peak, over = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.is_set():
            peak = max(peak, resident())
            time.sleep(0.0005)

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    write()
    over.set()
    watcher.join()
    return max(0, peak - before)


@pytest.mark.ranks(2)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_copy_needs_no_more_than_a_shard_and_a_tenth(tmp_path: Path) -> None:
    save(tmp_path / "warm", 1, {"model": nn.Linear(2, 2)})
    async_save(tmp_path / "warm", 2, {"model": nn.Linear(2, 2)}).wait()
    objects = big_model()
    size = sum(param.nbytes for param in objects["model"].parameters())
    extra = peak_bytes(lambda: async_save(tmp_path, 1, objects).wait())
    assert extra <= 1.1 * size + (1 << 20)


# ------------------------------------------------------------------------------------------------------ what fails


def fail() -> None:
    raise OSError(28, "No space left on device")


def fail_on_rank_1() -> None:
    if dist.get_rank() == 1:
        fail()


@on_local_tensors
def save_in_vain(folder: Path, then: str) -> tuple[str, int]:
    objects = trained(2)
    at("written", fail_on_rank_1)
    saving = async_save(folder, 2, objects)
    steps = 0
    with pytest.raises(SnapshotError) as caught:
        if then == "wait":
            saving.wait()
        elif then == "step":
            for steps in range(100_000):  # noqa: B007  # It is returned.
                dist.barrier()  # As the gradients of a step are reduced.
                train(objects["model"], objects["optimizer"], 1)
        else:
            save(folder, 3, objects) if then == "save" else load(folder, objects)
    vars(scale_snapshot.snapshot)["at_stage"] = lambda point, path: None
    dist.barrier()
    objects["optimizer"].step()  # It is raised once.
    async_save(folder, 4, objects).wait()
    return str(caught.value), steps


@pytest.mark.fault(45)
@pytest.mark.parametrize("then", ["wait", "step", "save", "load"])
def test_a_failure_is_raised_on_all_ranks_by_what_comes_next(tmp_path: Path, then: str) -> None:
    save(tmp_path, 1, trained(1))
    (first, at_step), (second, its_step) = run_ranks(save_in_vain, 2, tmp_path, then)
    assert first == second
    assert "step-00000002 failed on rank 1 of 2: OSError: [Errno 28] No space left on device" in first
    assert at_step == its_step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]


@on_local_tensors
def copy_in_vain(folder: Path) -> str:
    def no_memory(state: dict[str, Any]) -> dict[str, Any]:
        raise MemoryError("no room for the copy")

    if dist.get_rank() == 1:
        vars(scale_snapshot.saving)["copy_to_host"] = no_memory
    with pytest.raises(SnapshotError) as caught:
        async_save(folder, 1, trained(1)).wait()
    return str(caught.value)


def test_a_copy_that_fails_on_one_rank_is_a_failure_on_all(tmp_path: Path) -> None:
    for message in run_ranks(copy_in_vain, 2, tmp_path):
        assert "step-00000001 failed on rank 1 of 2: MemoryError: no room for the copy" in message
    assert list(tmp_path.iterdir()) == []


@on_local_tensors
def hear_late(folder: Path) -> tuple[str, int]:
    class Late(background.CollectiveCall):
        def all_ranks(self, act: Callable[[], T]) -> list[T]:
            results = super().all_ranks(act)
            if self.group.rank == 0:
                time.sleep(0.3)
            return results

    background.CollectiveCall = Late  # type: ignore[misc]  # This process ends with the test.
    return save_in_vain(folder, "step")


def test_a_failure_heard_of_late_is_raised_before_the_same_step(tmp_path: Path) -> None:
    save(tmp_path, 1, trained(1))
    (_, at_step), (_, its_step) = run_ranks(hear_late, 2, tmp_path)
    assert at_step == its_step


def test_hooks_are_there_only_while_a_save_is_pending(tmp_path: Path) -> None:
    from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

    objects = trained(1)
    before = list(hooks)
    async_save(tmp_path, 1, objects).wait()
    assert list(hooks) == before
    saving = async_save(tmp_path, 2, objects)
    assert len(hooks) == len(before) + 1
    train(objects["model"], objects["optimizer"], 1)
    saving.wait()
    assert list(hooks) == before


PROGRAM = """
import sys, torch
import scale_snapshot
from scale_snapshot import snapshot as below

def at_stage(point, path):
    if point == "manifest" and sys.argv[2] == "fail":
        raise OSError(28, "No space left on device")

below.at_stage = at_stage
model = torch.nn.Linear(300, 300)
scale_snapshot.async_save(sys.argv[1], 5, {"model": model})
if sys.argv[2] == "raise":
    raise ValueError("of the program")
"""


@pytest.mark.parametrize(("how", "said"), [("end", ""), ("raise", "of the program"), ("fail", "No space left")])
def test_a_program_that_ends_finishes_its_save_or_reports_it(tmp_path: Path, how: str, said: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), how], capture_output=True, text=True, timeout=600, check=False
    )
    assert said in run.stderr
    assert run.returncode == (1 if how == "raise" else 0)
    if how == "fail":
        assert "step-00000005 failed: OSError" in run.stderr
        assert "saved in the background, and the program has ended since" in run.stderr
    assert [path.name for path in tmp_path.iterdir()] == ([] if how == "fail" else ["step-00000005"])


@pytest.mark.ranks(2)
def test_a_save_goes_on_when_the_process_group_is_destroyed(tmp_path: Path) -> None:
    objects = trained(1)
    at("tensor", lambda: time.sleep(0.02))
    saving = async_save(tmp_path, 1, objects)
    saves = weakref.ref(cast(object, background.background_group(group_of()).process_group))
    dist.destroy_process_group()
    assert saving.wait() == latest(tmp_path) == tmp_path / "step-00000001"
    del saving, objects
    gc.collect()
    assert saves() is None, "the group of the saves has outlived the group that it was made for"


@on_local_tensors
def save_and_be_killed(folder: Path, point: str) -> None:
    objects = trained(4)
    at(point, lambda: os.kill(os.getpid(), signal.SIGKILL) if dist.get_rank() == 1 or point == "manifest" else None)
    async_save(folder, 4, objects)
    train(objects["model"], objects["optimizer"], 3)
    dist.barrier()
    time.sleep(LONG)


@pytest.mark.parametrize("point", ["tensor", "written", "manifest"])
def test_killed_while_it_is_written_the_snapshot_before_loads(tmp_path: Path, point: str) -> None:
    run_ranks(save_and_train_on, 2, tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(RankError, match="was killed by SIGKILL"):
        run_ranks(save_and_be_killed, 2, tmp_path, point)
    assert all(path.read_bytes() == data for path, data in before.items())
    check_it_is_of_step_3(tmp_path)
    save(tmp_path, 5, trained(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000005"]


@on_local_tensors
def save_on_other_ranks_too(folder: Path) -> Tensor:
    """Saves of a part of the ranks have a group of their own."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    value = torch.full((3,), float(mine))
    saving = async_save(folder / str(mine), 1, {"a": value}, process_group=halves[mine])
    for _ in range(20):  # Messages of all ranks at the same time.
        dist.all_reduce(torch.ones(10))
    saving.wait()
    found = torch.zeros(3)
    load(folder / str(mine), {"a": found}, process_group=halves[mine])
    return found


def test_a_group_of_some_of_the_ranks_saves_for_itself(tmp_path: Path) -> None:
    found = run_ranks(save_on_other_ranks_too, 4, tmp_path)
    assert [tensor[0].item() for tensor in found] == [0.0, 0.0, 1.0, 1.0]
