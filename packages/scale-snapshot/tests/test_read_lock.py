"""A snapshot that is read is not removed; a reader that loses its snapshot nevertheless reads the next."""

from __future__ import annotations

import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import scale_snapshot.snapshot
from scale_snapshot import SnapshotError, latest_snapshot, load, read_lock
from scale_snapshot import save as save_objects
from scale_snapshot.convert import open_checkpoint
from scale_snapshot.file_lock import Lock
from scale_snapshot.read_lock import ReadLock
from scale_snapshot.retention import remove_snapshot

READER = """
import sys, pathlib
from scale_snapshot.read_lock import ReadLock
with ReadLock(pathlib.Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def save(folder: Path, *steps: int, keep: int | None = None) -> None:
    for step in steps:
        save_objects(folder, step, {"a": torch.full((4,), float(step))}, keep=keep)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def another_process_reading(snapshot: Path) -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, "-c", READER, str(snapshot)]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None and reader.stdout.readline() == "locked\n"
        try:
            yield reader
        finally:
            reader.kill()


@pytest.mark.fault(111)
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_what_another_process_reads_stays_until_it_ends(tmp_path: Path, end: signal.Signals) -> None:
    save(tmp_path, 1, 2)
    with another_process_reading(tmp_path / "step-00000001") as reader:
        save(tmp_path, 3, keep=1)
        assert names_in(tmp_path) == ["step-00000001", "step-00000003"]
        assert not remove_snapshot(tmp_path / "step-00000001")
        reader.send_signal(end)
        reader.wait()
    save(tmp_path, 4, keep=1)
    assert names_in(tmp_path) == ["step-00000004"]


def test_two_processes_read_one_snapshot(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with another_process_reading(tmp_path / "step-00000001"):
        state = {"a": torch.zeros(4)}
        assert load(tmp_path, state).step == 1


def test_what_a_converter_reads_from_stays_while_it_can_read(tmp_path: Path) -> None:
    save(tmp_path, 1)
    opened = open_checkpoint(tmp_path)
    save(tmp_path, 2, keep=1)
    assert names_in(tmp_path) == ["step-00000001", "step-00000002"]
    (tensor,) = opened.tensors.values()
    assert tensor.load().tolist() == [1.0] * 4
    del opened, tensor
    save(tmp_path, 3, keep=1)
    assert names_in(tmp_path) == ["step-00000003"]


@contextmanager
def replaced_once(module: Any, name: str, act: Callable[[], None]) -> Iterator[None]:
    """Has `act` happen before the first call of a function."""
    function, calls = getattr(module, name), iter([act])

    def called(*args: Any, **kwargs: Any) -> Any:
        next(calls, lambda: None)()
        return function(*args, **kwargs)

    setattr(module, name, called)
    try:
        yield
    finally:
        setattr(module, name, function)


def replace_by(folder: Path, step: int) -> None:
    """As a training whose folder holds one snapshot does."""
    save(folder, step, keep=1)


@pytest.mark.fault(111)
def test_a_snapshot_that_goes_before_it_is_locked_is_no_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        warnings.catch_warnings(action="error"),
        replaced_once(scale_snapshot.snapshot, "ReadLock", lambda: replace_by(tmp_path, 2)),
    ):
        assert load(tmp_path, {"a": torch.zeros(4)}).step == 2
    with (
        warnings.catch_warnings(action="error"),
        replaced_once(scale_snapshot.snapshot, "ReadLock", lambda: replace_by(tmp_path, 3)),
    ):
        assert latest_snapshot(tmp_path, verify=True) == tmp_path / "step-00000003"


@pytest.mark.fault(111)
@pytest.mark.parametrize("phase", ["find_damage", "read_tensors"])
def test_without_locks_a_lost_snapshot_is_read_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.setattr(read_lock, "try_lock", lambda descriptor, exclusive: Lock.UNSUPPORTED)
    save(tmp_path, 1)
    into = torch.zeros(4)
    with (
        warnings.catch_warnings(action="error"),
        replaced_once(scale_snapshot.snapshot, phase, lambda: replace_by(tmp_path, 2)),
    ):
        assert load(tmp_path, {"a": into}).step == 2
    assert into.tolist() == [2.0] * 4


@pytest.mark.fault(111)
def test_without_locks_the_loss_of_an_asked_step_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_lock, "try_lock", lambda descriptor, exclusive: Lock.UNSUPPORTED)
    save(tmp_path, 1)
    with (
        replaced_once(scale_snapshot.snapshot, "read_tensors", lambda: replace_by(tmp_path, 2)),
        pytest.raises(SnapshotError, match="which has overwritten a part of the state, failed: FileNotFoundError"),
    ):
        load(tmp_path, {"a": torch.zeros(4)}, step=1)


def test_the_lock_of_what_is_not_there_is_taken_for_nothing(tmp_path: Path) -> None:
    with ReadLock(tmp_path / "step-00000001"):
        pass
