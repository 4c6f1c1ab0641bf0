"""What one rank raises is named by all, also where the collectives are torch's own."""

import subprocess
import sys
from pathlib import Path

import pytest
from program_folder import enter_program_folder

# An error that nobody expects, or a kill, in the third step of one rank.
PROGRAM = """
import os, signal, sys
import scale_train.training.trainer as trainer
from scale_train.training.state import TrainState

rank, what = int(sys.argv[1]), sys.argv[2]
windows_at, calls = trainer.windows_at, []
resume_hint = TrainState.resume_hint

def hint_while_the_launcher_ends_this_rank(training):
    os.kill(os.getpid(), signal.SIGTERM)
    return resume_hint(training)

def failing(*arguments):
    calls.append(1)
    if int(os.environ.get("RANK", "0")) == rank and len(calls) == 3:
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("no such token: 7") if what == "raise" else MemoryError()
    return windows_at(*arguments)

trainer.windows_at = failing
if what == "memory":
    TrainState.resume_hint = hint_while_the_launcher_ends_this_rank
if __name__ == "__main__":
    from scale_train.cli import main
    sys.exit(main(sys.argv[3:]))
"""
OPTIONS = (
    "--text text --layers 1 --width 16 --heads 2 --sequence 16 --batch 4 --evaluate-every 0 --warmup 2 --log-every 1 "
    "--sample-length 0 --device cpu --steps 6 --out run --save-every 2 --log-format json"
)


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    enter_program_folder(tmp_path, monkeypatch)
    Path("program.py").write_text(PROGRAM)


def train(parallel: str, rank: int, what: str, *, under_torchrun: bool) -> subprocess.CompletedProcess[str]:
    arguments = ["program.py", str(rank), what, "lm", *OPTIONS.split(), "--parallel", parallel]
    command = [sys.executable, *arguments, "--ranks", "2"]
    if under_torchrun:
        torchrun = "torch.distributed.run"
        command = [sys.executable, "-m", torchrun, "--standalone", "--nproc-per-node", "2", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.fault(106, techniques=("ddp", "oss"))
@pytest.mark.parametrize(
    "parallel, rank",
    [("ddp", 0), ("oss", 1), *(pytest.param(*case, marks=pytest.mark.soak) for case in (("ddp", 1), ("oss", 0)))],
)
def test_an_error_of_one_rank_is_named_by_the_others(parallel, rank):
    ended = train(parallel, rank, "raise", under_torchrun=True)
    other = 1 - rank
    assert ended.returncode != 0
    assert (
        f"scale-train, rank {other}: lost the other ranks after step 2 (rank {rank} raised RuntimeError: no such "
        "token: 7); go on with --resume run, from step-00000002"
    ) in ended.stderr
    assert ended.stderr.count("Traceback") <= 2  # That of the rank itself, and torchrun's own.
    assert "Connection closed by peer" not in ended.stderr


@pytest.mark.fault(106)
def test_an_error_without_a_text_is_named_by_its_class():
    ended = train("ddp", 1, "memory", under_torchrun=False)
    assert "rank 1 raised MemoryError); go on with" in ended.stderr


@pytest.mark.fault(106, techniques=("ddp", "oss"))
@pytest.mark.parametrize("parallel", ["ddp", pytest.param("oss", marks=pytest.mark.soak)])
def test_a_rank_that_is_killed_is_told_without_a_traceback(parallel):
    ended = train(parallel, 1, "kill", under_torchrun=True)
    assert ended.returncode != 0
    assert "scale-train, rank 0: lost the other ranks after step 2 (RuntimeError: " in ended.stderr
    assert "go on with --resume run, from step-00000002" in ended.stderr
    assert ended.stderr.count("Traceback") <= 1  # torchrun's own.
