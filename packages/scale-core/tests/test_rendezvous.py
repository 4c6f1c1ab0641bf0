import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scale_core.comm.group import Group
from scale_core.errors import LaunchError
from scale_core.launch import launcher, rendezvous, roll_call
from scale_core.launch.rendezvous import init_distributed, open_store
from scale_core.testing import run_ranks

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


def free_port() -> int:
    store = open_store("127.0.0.1", 0, serve=True, timeout=1.0)
    port: int = store.port
    return port


def join(folder: Path, ranks: list[int], sizes: list[int], port: int, timeout: float) -> tuple[str, float]:
    """What init_distributed says to the process whose place in the lists is the number of files before its own."""
    mine = claim(folder, len(ranks))
    os.environ.update({"RANK": str(ranks[mine]), "WORLD_SIZE": str(sizes[mine]), "MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = str(port)
    try:
        group = init_distributed(device="cpu", limit_seconds=timeout)
    except LaunchError as error:
        # Rank 0 serves the store: the others must have read their verdict before it goes.
        (folder / f"done-{mine}").touch()
        wait_until(lambda: len(list(folder.glob("done-*"))) == len(ranks))
        return str(error), group_sum(None)
    return f"{group.rank} of {group.size}", group_sum(group)


def claim(folder: Path, num_ranks: int) -> int:
    for place in range(num_ranks):
        try:
            (folder / f"place-{place}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return place
    raise AssertionError("more processes than places")


def wait_until(condition: object) -> None:
    assert callable(condition)
    while not condition():
        time.sleep(0.01)


def group_sum(group: Group | None) -> float:
    if group is None:
        return -1.0
    total = torch.tensor([1.0 + group.rank])
    dist.all_reduce(total)
    return total.item()


def join_twice(port: int) -> list[bool]:
    folder = Path(os.environ["MEETING"])
    mine = claim(folder, 2)
    os.environ.update({"RANK": str(mine), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    first = init_distributed(device="cpu")
    same = init_distributed(device="cpu") == first
    dist.barrier()
    dist.destroy_process_group()
    again = init_distributed(device="cpu")
    sums = group_sum(again) == 3.0
    dist.barrier()
    return [same, sums]


def test_without_the_variables_it_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    assert init_distributed() == Group()
    assert not dist.is_initialized()


def test_ranks_find_each_other_by_the_variables(tmp_path: Path) -> None:
    results = run_ranks(join, 2, tmp_path, [0, 1], [2, 2], free_port(), 30.0, backend=None)
    assert sorted(results) == [("0 of 2", 3.0), ("1 of 2", 3.0)]


def test_a_second_call_returns_the_same_group_until_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEETING", str(tmp_path))
    assert run_ranks(join_twice, 2, free_port(), backend=None) == [[True, True]] * 2


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_tensors_of_either_device_can_be_sent(monkeypatch: pytest.MonkeyPatch, device: str, backend: str) -> None:
    found = []
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(rendezvous, "_take_device", lambda local_rank: None)
    monkeypatch.setattr(rendezvous, "_rendezvous", lambda place, timeout, config: None)
    monkeypatch.setattr(rendezvous, "group_of", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: found.append(backend))
    init_distributed(device=device)
    assert found == [backend]


@pytest.mark.parametrize(
    ("variables", "visible", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": "3"}, 1, 0),  # As under Slurm's --gpus-per-task=1.
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 4, 2),
        ({}, 4, 2),
        ({"CUDA_VISIBLE_DEVICES": "0", "TORCHELASTIC_RUN_ID": "none"}, 1, None),
        ({}, 1, None),
    ],
)
def test_a_rank_takes_the_device_of_its_number_or_the_only_one(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], visible: int, expected: int | None
) -> None:
    for name in ("CUDA_VISIBLE_DEVICES", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    if expected is None:
        with pytest.raises(ValueError, match="expected at most 1 ranks on this machine"):
            rendezvous._take_device(2)
    else:
        rendezvous._take_device(2)
        assert taken == [expected]


def test_ranks_of_launch_local_are_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a host with a GPU, too, a program for CPUs stays there."""
    found: list[str] = []
    variables = launcher._variables(1, 2, 1, "cpu")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(rendezvous, "_rendezvous", lambda place, timeout, config: None)
    monkeypatch.setattr(rendezvous, "group_of", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: found.append(backend))
    init_distributed()
    assert found == ["gloo"]


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("ranks", "sizes", "message"),
    [
        ([0, 0], [2, 2], "two ranks have RANK=0"),
        ([0, 1], [2, 3], "WORLD_SIZE is"),
    ],
)
def test_ranks_that_contradict_each_other_all_say_so(
    tmp_path: Path, ranks: list[int], sizes: list[int], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store("127.0.0.1", 0, serve=True, timeout=30.0)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    results = run_ranks(join, 2, tmp_path, ranks, sizes, store.port, 30.0, backend=None)
    assert all(message in text and "MASTER_PORT=" in text for text, _ in results), results


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    ((text, _),) = run_ranks(join, 1, tmp_path, [0], [3], free_port(), 2.0, backend=None)
    assert "rank 1, 2 of 3 did not come within 2 s" in text
    assert "RANK=0, WORLD_SIZE=3" in text


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "2"}, "expected RANK below WORLD_SIZE, got 2 of 2"),
        ({"RANK": ""}, "RANK is not set"),
        ({"WORLD_SIZE": "two"}, "expected a number in WORLD_SIZE, got 'two'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({"MASTER_PORT": ""}, "MASTER_PORT is not set"),
    ],
)
def test_wrong_variables_are_named_with_what_was_seen(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], message: str
) -> None:
    right = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in {**right, **changed}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LaunchError, match=f"{message}. This rank saw RANK="):
        init_distributed()


# Of the second one (RFC 5737) not even a refusal comes.
@pytest.mark.fault(35)
@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
def test_an_address_where_nobody_answers_is_an_error_in_time(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": address}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    began = time.monotonic()
    with pytest.raises(
        LaunchError, match=rf"no store at {address}:\d+ within 1 s: nobody answers.*MASTER_ADDR={address}"
    ):
        init_distributed(device="cpu", limit_seconds=1.0)
    assert time.monotonic() - began < 60


FOREIGN = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connections = []
while True:
    connections.append(server.accept()[0])
    try:
        connections[-1].sendall(sys.argv[1].encode())
    except OSError:  # Whoever connected has left.
        pass
"""


@pytest.mark.fault(104)
@pytest.mark.parametrize(
    ("said", "told"),
    [
        (b"SSH-2.0-other\r\n", r"another program listens there, which says b'SSH-2\.0-other"),
        (b"", "something listens there, and has not answered as torch's store does"),
    ],
)
def test_a_foreign_program_on_the_port_is_an_error_in_time(
    said: bytes, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process of its own: its connections end with it, also one that comes in at the very end.
    program = [sys.executable, "-c", FOREIGN, said.decode()]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as foreign:
        try:
            assert foreign.stdout is not None
            port = foreign.stdout.readline().strip()
            for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setenv("MASTER_PORT", port)
            began = time.monotonic()
            with pytest.raises(LaunchError, match=rf"no store at 127\.0\.0\.1:\d+ within 1 s: {told}"):
                init_distributed(device="cpu", limit_seconds=1.0)
            assert time.monotonic() - began < 60
        finally:
            foreign.kill()


@pytest.mark.fault(34)
def test_a_port_that_is_taken_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store("127.0.0.1", 0, serve=True, timeout=1.0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    with pytest.raises(
        LaunchError,
        match=f"no store at 127.0.0.1:{store.port} .*another program has this port",
    ):
        init_distributed(device="cpu", limit_seconds=1.0)


RESTARTED = """
import os, pathlib, signal, sys, torch, torch.distributed as dist
from scale_core.launch import init_distributed
group = init_distributed(device="cpu", limit_seconds=600)
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
total = torch.ones(1)
dist.all_reduce(total)
if attempt == "0" and group.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
pathlib.Path(sys.argv[1], f"attempt-{attempt}-rank-{group.rank}").write_text(str(total.item()))
dist.destroy_process_group()
os._exit(0)
"""


@pytest.mark.fault(15)
def test_ranks_that_torchrun_restarts_meet_again(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(RESTARTED)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["--monitor-interval=0.1", f"--master-port={free_port()}", str(script), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            _, errors = process.communicate(timeout=600)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, errors
    written = {path.name: path.read_text() for path in tmp_path.glob("attempt-*")}
    assert written == {"attempt-1-rank-0": "2.0", "attempt-1-rank-1": "2.0"}


def join_job(folder: Path, port: int) -> str:
    """Returns the result or the error of init_distributed, for a rank of one of the two jobs."""
    mine = claim(folder, 4)
    os.environ.update({"RANK": str(mine % 2), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    roll_call._SHORT_GRACE = roll_call._LONG_GRACE = 100.0
    try:
        # A rank that comes after the others have failed waits this long for the other one of its job.
        init_distributed(device="cpu", limit_seconds=60.0)
    except LaunchError as error:
        return str(error)
    return "joined"


@pytest.mark.fault(114)
def test_two_jobs_on_one_port_never_mix(tmp_path: Path) -> None:
    port = free_port()
    messages = run_ranks(join_job, 4, tmp_path, port, backend=None)
    assert all(f"MASTER_PORT={port}" in message for message in messages), messages
    assert any("choose another MASTER_PORT" in message for message in messages), messages
