"""One program at a time trains in a run's folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from program_folder import enter_program_folder

from scale_snapshot.file_lock import Lock
from scale_train.cli import main
from scale_train.errors import InputError
from scale_train.training import run_lock
from scale_train.training.reports.reporters import read_metrics
from scale_train.training.run_lock import FILE, RunLock

HOLDER = """
import pathlib, sys
from scale_train.training.run_lock import RunLock
lock = RunLock()
lock.take(pathlib.Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
lock.release()
"""
OPTIONS = (
    "--text text --layers 1 --width 16 --heads 2 --sequence 16 --batch 4 --save-every 2 --evaluate-every 0 "
    "--warmup 2 --sample-length 0 --device cpu --ranks 1 --log-every 1 --log-format json"
)
ARGUMENTS = ["lm", *OPTIONS.split()]


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    enter_program_folder(tmp_path, monkeypatch)
    monkeypatch.setattr(run_lock, "_PATIENCE_SECONDS", 0.5)


def holder(folder: Path) -> subprocess.Popen:
    program = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    return process


@pytest.mark.fault(107)
def test_a_run_that_goes_on_is_not_resumed_and_is_not_disturbed(capsys):
    command = [sys.executable, "-m", "scale_train", *ARGUMENTS, "--steps", "100000", "--out", "run"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as first:
        try:
            for line in first.stdout:
                if line.startswith("{") and json.loads(line).get("step", 0) >= 4:
                    break
            facts = json.loads(Path("run", FILE).read_text())
            assert facts["pid"] == first.pid
            assert main([*ARGUMENTS, "--steps", "6", "--resume", "run"]) == 2
            told = capsys.readouterr().err
            assert f"run: a run writes there (process {first.pid} on {facts['host']}, since {facts['start']}): " in told
            first.send_signal(signal.SIGTERM)
            first.stdout.read()
            assert first.wait() == 143
        finally:
            first.kill()
    assert not Path("run", FILE).exists()
    steps = [entry["step"] for entry in read_metrics(Path("run", "metrics.jsonl"))]
    assert steps == list(range(1, len(steps) + 1))
    assert main([*ARGUMENTS, "--steps", str(len(steps) + 2), "--resume", "run"]) == 0


@pytest.mark.fault(107)
def test_the_lock_of_a_program_that_was_killed_is_free_at_once():
    process = holder(Path())
    process.kill()
    process.communicate()
    assert Path(FILE).exists()
    lock = RunLock()
    assert not lock.take(Path())  # Nobody has been there since.
    lock.release()
    assert not Path(FILE).exists()


def test_a_second_program_is_refused_or_waits_for_the_first(monkeypatch):
    process = holder(Path())
    with pytest.raises(InputError, match=rf"a run writes there \(process {process.pid} on "):
        RunLock().take(Path())
    monkeypatch.setattr(run_lock, "_PATIENCE_SECONDS", 60.0)
    ending = threading.Timer(0.5, process.communicate)
    ending.start()
    lock = RunLock()
    assert lock.take(Path())
    lock.release()
    ending.join()


def leave_behind(machine: str) -> None:
    """The file of a run of another machine, which was killed or goes on."""
    Path(FILE).write_text(json.dumps({"host": "node7", "machine": machine, "pid": 7, "start": "2026-11-28T10:00:00"}))


@pytest.mark.fault(107)
@pytest.mark.parametrize("locks", [Lock.TAKEN, Lock.UNSUPPORTED], ids=["of one machine alone", "none"])
def test_runs_of_other_machines_are_known_by_what_they_touch(monkeypatch, locks):
    monkeypatch.setattr(run_lock, "try_lock", lambda descriptor, exclusive: locks)
    monkeypatch.setattr(run_lock, "_WATCH_SECONDS", 1.0)
    leave_behind("another")
    over = threading.Event()

    def touch() -> None:
        while not over.wait(0.05):
            os.utime(FILE)

    beats = threading.Thread(target=touch)
    beats.start()
    try:
        with pytest.raises(InputError, match=r"a run writes there \(process 7 on node7, since 2026-11-28T10:00:00\)"):
            RunLock().take(Path())
    finally:
        over.set()
        beats.join()
    lock = RunLock()
    assert lock.take(Path())  # Nobody touches it any more.
    lock.release()


def test_a_run_touches_its_file(monkeypatch):
    monkeypatch.setattr(run_lock, "_BEAT_SECONDS", 0.01)
    lock = RunLock()
    lock.take(Path())
    os.utime(FILE, (0, 0))
    while not Path(FILE).stat().st_mtime:
        time.sleep(0.01)
    lock.release()


def test_the_file_of_this_machine_is_not_watched(monkeypatch):
    monkeypatch.setattr(RunLock, "_is_touched", lambda lock: pytest.fail("it waits for nothing"))
    leave_behind(run_lock._machine())
    lock = RunLock()
    assert not lock.take(Path())
    lock.release()


def test_another_machines_run_that_ends_leaves_the_folder_free(monkeypatch):
    monkeypatch.setattr(run_lock, "_WATCH_SECONDS", 60.0)
    leave_behind("another")
    ending = threading.Timer(0.5, Path(FILE).unlink)
    ending.start()
    lock = RunLock()
    assert lock.take(Path())
    ending.join()
    assert json.loads(Path(FILE).read_text())["pid"] == os.getpid()
    lock.release()


def test_a_run_that_another_one_has_taken_over_leaves_its_file():
    lock = RunLock()
    lock.take(Path())
    Path(FILE).unlink()
    leave_behind("another")
    lock.release()
    assert json.loads(Path(FILE).read_text())["host"] == "node7"


def test_a_file_that_was_written_in_part_is_no_obstacle():
    Path(FILE).write_text('{"host": "no')
    lock = RunLock()
    assert not lock.take(Path())
    lock.release()
