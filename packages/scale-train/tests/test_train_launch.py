import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from program_folder import TEXT, enter_program_folder

from scale_core.comm.group import group_of
from scale_core.testing import faults, run_ranks
from scale_train.cli import main, parse
from scale_train.errors import InputError, Interrupted, RanksLost, TrainingDiverged
from scale_train.launch.launcher import _PIPE_CHARACTERS, RankExit, _check_environment, _exit_of, is_under_torchrun
from scale_train.options import Options, ParallelOptions
from scale_train.training.reports.reporters import read_metrics
from scale_train.training.train import train_language_model

STEPS = 8
ARGUMENTS = (
    "lm --text text --layers 1 --width 16 --heads 2 --sequence 16 --batch 4 --save-every 2 --evaluate-every 0 "
    f"--steps {STEPS} --warmup 2 --sample-length 0 --device cpu --ranks 2 --log-every 1 --log-format json"
).split()

UNDER_TORCHRUN = " ".join(ARGUMENTS).replace("--ranks 2 ", "").split()


@contextmanager
def program(*arguments: str, command: list[str] | None = None) -> Iterator[subprocess.Popen[str]]:
    command = command or [sys.executable, "-m", "scale_train", *ARGUMENTS, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def pid_of_rank(rank: int, process: subprocess.Popen[str]) -> int:
    for child in children(process):
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return child
    raise AssertionError(f"there is no rank {rank}")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_for_step(process: subprocess.Popen[str], step: int) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{") and json.loads(line).get("step") == step:
            return
    assert process.stderr is not None
    raise AssertionError(f"ended before step {step}: {process.stderr.read()}")


def losses(run: str) -> dict[int, float]:
    return {entry["step"]: entry["loss"] for entry in read_metrics(Path(run, "metrics.jsonl")) if "loss" in entry}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    enter_program_folder(tmp_path, monkeypatch)


def train_here(options: Options) -> None:
    train_language_model(options, group_of())


def train_forked(*arguments: str) -> None:
    """What `scale-train` does, on ranks that have imported everything already."""
    run_ranks(train_here, 2, parse([*ARGUMENTS, *arguments]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[int, float]:
    """The losses of a run that nobody has disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "text").write_bytes(TEXT)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        train_forked("--out", "run")
        found = losses("run")
    assert len(found) == STEPS
    return found


@pytest.mark.fault(93)
@pytest.mark.skipif(sys.platform != "linux", reason="looks for a rank among the processes")
def test_a_run_that_loses_a_rank_goes_on_to_the_same_curve(whole):
    with program("--out", "broken") as killed:
        wait_for_step(killed, 3)
        os.kill(pid_of_rank(1, killed), signal.SIGKILL)
        _, err = killed.communicate(timeout=600)
    assert killed.returncode == 1, err
    first, *_, last = err.splitlines()  # torch may warn between them that the rank's last words never came
    assert "Traceback" not in err
    assert first == "rank 1 was killed by SIGKILL; the others are ended"
    assert last.startswith("scale-train, rank 0: lost the other ranks after step")
    assert "; go on with --resume broken, from step-0000000" in last
    with program("--resume", "broken") as interrupted:
        wait_for_step(interrupted, STEPS - 3)
        interrupted.send_signal(signal.SIGINT)
        _, err = interrupted.communicate(timeout=600)
    assert interrupted.returncode == 130, err
    assert "which is saved; go on with --resume broken, from step-" in err and err.count("\n") == 1
    train_forked("--resume", "broken")
    assert losses("broken") == whole


@pytest.mark.fault(15)
@pytest.mark.skipif(sys.platform != "linux", reason="looks for a rank among the processes")
def test_ranks_that_torchrun_restarts_go_on_to_the_same_curve(whole, monkeypatch):
    # The ranks that are started again wait here for their agent's end, in their fourth step.
    late = faults.delay_at("optimizer.step", 0, 4, seconds=600, attempt=1)
    for name, value in faults.to_environment(late).items():
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    command += ["-m", "scale_train", *UNDER_TORCHRUN, "--out", "restarted"]
    with program(command=command) as agent:
        wait_for_step(agent, 3)
        os.kill(pid_of_rank(1, agent), signal.SIGKILL)
        wait_for_step(agent, 5)
        ranks = [pid_of_rank(rank, agent) for rank in range(2)]
        agent.kill()
        deadline = time.monotonic() + 60
        while any(is_running(pid) for pid in ranks):
            assert time.monotonic() < deadline, "ranks are left without their agent"
            time.sleep(0.05)
        _, err = agent.communicate(timeout=600)
    assert "scale-train, rank 0: lost the other ranks after step" in err and "Connection closed" not in err
    for name in faults.to_environment():
        monkeypatch.delenv(name)
    assert set(losses("restarted")) < set(whole)
    train_forked("--resume", "restarted")
    assert losses("restarted") == whole


def test_a_sigterm_to_one_rank_ends_all_after_a_step():
    endless = " ".join(ARGUMENTS).replace(f"--steps {STEPS}", "--steps 100000").split()
    command = [sys.executable, "-m", "scale_train", *endless, "--out", "stopped"]
    with program(command=command) as started:
        wait_for_step(started, 2)
        rank = pid_of_rank(1, started)
        for _ in range(2):
            os.kill(rank, signal.SIGTERM)
        _, err = started.communicate(timeout=600)
    assert started.returncode == 143, err
    assert err.startswith("scale-train: stopped after step ") and "which is saved" in err and err.count("\n") == 1


@pytest.mark.soak  # The default run has the ranks' one line of an interrupted run.
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


@pytest.mark.parametrize(
    ("code", "diverged", "error"),
    [(2, False, InputError), (130, False, Interrupted), (1, True, TrainingDiverged), (1, False, RanksLost)],
)
def test_train_raises_the_error_of_a_rank_s_exit_code(code, diverged, error):
    raised = RankExit(code, "scale-train: no disk", diverged=diverged).to_error()
    assert type(raised) is error and "no disk" in str(raised) and raised.exit_code == code


def test_rank_0_says_what_all_find_and_one_what_it_finds_alone():
    for found_by, speakers in (("all", [0]), ("machine", [0, 2]), ("rank", [0, 1, 2, 3])):
        outcome = RankExit(2, "what", found_by)
        said = [rank for rank in range(4) if outcome.should_print({"RANK": str(rank), "LOCAL_RANK": str(rank % 2)})]
        assert said == speakers


@pytest.mark.parametrize("more", [0, 1])
def test_a_message_is_cut_to_what_a_pipe_writes_at_once(more):
    prefix = "scale-train: "
    message = _exit_of(2, ValueError("x" * (_PIPE_CHARACTERS - len(prefix) + more)), "all", 0).message
    assert message == prefix + "x" * (_PIPE_CHARACTERS - len(prefix)) + " ..." * more


@pytest.mark.parametrize(
    "variables, words",
    [
        ({"RANK": "0", "WORLD_SIZE": "x"}, "WORLD_SIZE=x: a number is needed"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": ""}, "LOCAL_WORLD_SIZE=: a number is needed"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "rank 1: MASTER_ADDR is not set"),
        ({"RANK": "y", "WORLD_SIZE": "2"}, "expected a number in RANK, got 'y'"),
    ],
)
def test_wrong_variables_are_one_line_and_code_2_on_any_rank(monkeypatch, capsys, variables, words):
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["lm", "--text", "text", "--device", "cpu"]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1
