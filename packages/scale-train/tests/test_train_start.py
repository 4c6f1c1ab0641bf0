import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from scale_train.cli import main
from scale_train.errors import InputError
from scale_train.options import Options, ParallelOptions
from scale_train.progress import read_metrics
from scale_train.start import _check_environment, is_under_torchrun

STEPS = 12
ARGUMENTS = (
    "lm --text text --layers 1 --width 16 --heads 2 --sequence 16 --batch 4 --save-every 2 --evaluate-every 0 "
    f"--steps {STEPS} --warmup 2 --sample-length 0 --device cpu --ranks 2 --log-every 1 --log-format json"
).split()


@contextmanager
def program(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "scale_train", *ARGUMENTS, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line).get("step") == step:
            return
    assert process.stderr is not None
    raise AssertionError(f"ended before step {step}: {process.stderr.read()}")


def losses(run: str) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_metrics(Path(run, "metrics.jsonl")) if "loss" in entry}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    # Warnings are errors here, not in the program that is started: Python's multiprocessing itself has some at its end.
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    Path("text").write_bytes(bytes((7 * index * index) % 26 + 97 for index in range(3_000)))


def test_a_run_that_is_killed_and_then_interrupted_goes_on_to_the_same_curve(capfd):
    assert main([*ARGUMENTS, "--out", "whole"]) == 0
    with program("--out", "broken") as killed:
        wait_for_step(killed, 5)
        killed.kill()
    with program("--resume", "broken") as interrupted:
        wait_for_step(interrupted, 7)
        interrupted.send_signal(signal.SIGINT)
        _, err = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130, err
    assert "which is saved; go on with --resume" in err and err.count("\n") == 1
    assert main([*ARGUMENTS, "--resume", "broken"]) == 0
    assert losses("broken") == losses("whole")
    assert len(losses("whole")) == STEPS


def test_what_all_ranks_find_wrong_is_said_once(capfd):
    Path("run").mkdir()
    Path("run/kept").write_text("")
    assert main([*ARGUMENTS, "--out", "run"]) == 2
    _, err = capfd.readouterr()
    assert err.count("\n") == 1 and "--out run: exists" in err
    assert os.listdir("run") == ["kept"]


def test_ranks_that_somebody_else_started_are_joined(monkeypatch):
    assert is_under_torchrun({"RANK": "0", "WORLD_SIZE": "2"})
    assert not is_under_torchrun({"RANK": "0"})
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="--ranks 2: torchrun started 4 ranks"):
        _check_environment(Options(parallel=ParallelOptions(ranks=2)))
