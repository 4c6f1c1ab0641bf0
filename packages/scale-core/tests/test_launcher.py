import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scale_core.launch import init_distributed, launch_local
from scale_core.launch import launcher as launch
from scale_core.launch.launcher import format_exit_code


def write_sum(folder: Path) -> None:
    group = init_distributed(limit_seconds=600.0)
    total = torch.tensor([1.0 + group.rank])
    dist.all_reduce(total)
    names = ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "WORLD_SIZE")
    (folder / str(group.rank)).write_text(f"{total.item()} {[os.environ[name] for name in names]}")
    dist.barrier()


def end_rank_1(kind: str) -> None:
    if os.environ["RANK"] == "1":
        if kind == "exit":
            sys.exit(3)
        if kind == "raise":
            raise ValueError("rank 1 is unwell")
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def wait_for_a_signal(folder: Path, kind: str) -> None:
    def leave(number: int, _frame: object) -> None:
        (folder / f"caught-{os.environ['RANK']}").write_text(str(number))
        sys.exit(0)

    if kind == "catch":
        signal.signal(signal.SIGTERM, leave)
    if kind == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))
    for _ in range(6000):  # A signal that another thread gets is handled when the main thread comes out of a call.
        time.sleep(0.1)


PROGRAM = """
import sys
from pathlib import Path
from scale_core.launch import launch_local
from test_launcher import wait_for_a_signal
if __name__ == "__main__":
    folder, kind, num_ranks = sys.argv[1:]
    grace = 1.0 if kind == "ignore" else 600.0
    sys.exit(launch_local(wait_for_a_signal, int(num_ranks), Path(folder), kind, grace=grace))
"""


# Its ranks load this file too, before they are told what to do.
INTERRUPTED_PROGRAM = """
import os, signal, sys
from scale_core.launch import launch_local
if "RANK" in os.environ:
    os.kill(os.getpid(), signal.SIGINT)
def nothing():
    pass
if __name__ == "__main__":
    sys.exit(launch_local(nothing, 1))
"""


def start_program(folder: Path, kind: str, num_ranks: int = 1) -> tuple["subprocess.Popen[bytes]", list[int]]:
    """Returns a program whose ranks have started, and their process ids."""
    script = folder / "program.py"
    script.write_text(PROGRAM)
    paths = os.pathsep.join(filter(None, [os.path.dirname(__file__), *sys.path]))
    command = [sys.executable, str(script), str(folder), kind, str(num_ranks)]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
    files = [folder / f"pid-{rank}" for rank in range(num_ranks)]
    while not all(file.exists() and file.read_text() for file in files):
        assert process.poll() is None, "the program ended before its ranks were up"
        time.sleep(0.02)
    return process, [int(file.read_text()) for file in files]


def have_ended(pids: list[int]) -> bool:
    """Whether the processes end; a zombie has."""
    for _ in range(1000):
        if not any(is_running(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_ranks_meet_and_have_the_allocator_s_settings(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert launch_local(write_sum, 2, tmp_path) == 0
    expected = "3.0 ['0', '2147483647', '2']"
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == [expected] * 2
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("kind", "code", "message"),
    [
        ("exit", 3, "rank 1 exited with code 3"),
        ("raise", 1, "ValueError: rank 1 is unwell"),
        ("kill", 137, "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_others(
    kind: str, code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch_local(end_rank_1, 2, kind) == code
    assert message in capfd.readouterr().err


def end_late() -> None:
    """Rank 1 goes on for a while when rank 0 has ended."""
    time.sleep(0 if os.environ["RANK"] == "0" else 4)


@pytest.mark.fault(100)
def test_a_rank_that_outlives_the_others_is_named_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCALE_LIMIT_SECONDS", "1")
    assert launch_local(end_late, 2) == 0
    assert capfd.readouterr().err.count("rank 1 still runs 1 s after others have ended. If it is blocked") == 1


def end_blocked() -> None:
    if init_distributed(device="cpu").rank == 1:
        vars(dist)["destroy_process_group"] = lambda: time.sleep(600)


@pytest.mark.fault(100)
def test_a_rank_whose_group_stays_ends_nevertheless(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCALE_LIMIT_SECONDS", "5")
    began = time.monotonic()
    assert launch_local(end_blocked, 2) == 0
    assert time.monotonic() - began < 300
    assert "rank 1: destroy_process_group() still blocks after 5 s; the rank ends" in capfd.readouterr().err


def test_a_signal_reaches_every_rank_and_may_be_handled(tmp_path: Path) -> None:
    process, pids = start_program(tmp_path, "catch", 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 0
    caught = [(tmp_path / f"caught-{rank}").read_text() for rank in range(2)]
    assert caught == [str(int(signal.SIGTERM))] * 2
    assert have_ended(pids)


def test_a_signal_that_nobody_handles_is_the_exit_code(tmp_path: Path) -> None:
    process, pids = start_program(tmp_path, "default")
    process.send_signal(signal.SIGINT)
    assert process.wait(600) == 130
    assert have_ended(pids)


@pytest.mark.fault(96)
def test_ranks_that_ignore_the_signal_are_killed_after_the_grace(tmp_path: Path) -> None:
    process, pids = start_program(tmp_path, "ignore")
    process.send_signal(signal.SIGTERM)
    assert process.wait(600) == 143
    assert have_ended(pids)


@pytest.mark.fault(17)
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_ranks_end_when_the_program_is_killed(tmp_path: Path) -> None:
    process, pids = start_program(tmp_path, "ignore")
    process.kill()
    process.wait(600)
    assert have_ended(pids)


@pytest.mark.fault(93)
@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="the system cannot hold signals back")
def test_ctrl_c_while_a_rank_is_loading_ends_it_afterwards(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(INTERRUPTED_PROGRAM)
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 130
    assert ended.stderr == "rank 0 exited with code 130; the others are ended\n"


@pytest.mark.parametrize("looks", range(6))
def test_a_rank_that_fails_between_two_looks_at_it_is_seen(looks: int) -> None:
    class Rank:
        def __init__(self) -> None:
            self.sentinel, self._other_end = os.pipe()
            os.close(self._other_end)  # Always ready: nobody waits.
            self._looks = looks

        @property
        def exitcode(self) -> int | None:
            self._looks -= 1
            return None if self._looks >= 0 else 3

    rank = Rank()
    try:
        assert launch._supervise([rank], [], grace=1.0) == 3  # type: ignore[list-item]
    finally:
        os.close(rank.sentinel)


def test_ranks_share_the_cores_unless_threads_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads = [launch._variables(0, num_ranks, 1, "cpu")["OMP_NUM_THREADS"] for num_ranks in (1, 3, 9)]
    assert threads == ["8", "2", "1"]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert "OMP_NUM_THREADS" not in launch._variables(0, 1, 1, "cpu")


def test_no_ranks_and_more_ranks_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        launch_local(write_sum, 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="at most 1 ranks, one for each CUDA device, got 2"):
        launch_local(write_sum, 2, device="cuda")


def test_exits_have_names() -> None:
    assert [format_exit_code(code) for code in (0, 2, -9, -200)] == [
        "exited with code 0",
        "exited with code 2",
        "was killed by SIGKILL",
        "was killed by signal 200",
    ]
