"""Two machines with an agent of torchrun each: a link between them that is cut, and one that comes later and goes."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

JOB = """
import os, sys
from pathlib import Path
import torch
from torch import nn
from scale_core import ScaleDistributedError
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.launch import init_distributed
from scale_snapshot import latest_snapshot, load_snapshot, save_snapshot
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_fsdp import fully_shard

folder = Path(sys.argv[1])
group = init_distributed(device="cpu")

def tell(line):
    with (folder / os.environ.get("TELLS", f"rank-{group.rank}")).open("a") as file:
        file.write(line + "\\n")

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
try:
    if latest_snapshot(folder / "snapshots") is not None:
        found = load_snapshot(folder / "snapshots", lambda saved: target_state_dict(model, optimizer, saved))
        load_sharded_state_dict(found.state, model, optimizer)
        step = found.step
        tell(f"resumed on {group.size} after {step}")
    while not CollectiveCall(group, "going on", RuntimeError).rank0((folder / "enough").exists):
        torch.manual_seed(1000 + step)
        model(torch.randn(4, 8).chunk(group.size)[group.rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        save_snapshot(folder / "snapshots", step, sharded_state_dict(model, optimizer))
        tell(f"step {step}")
except ScaleDistributedError as error:
    tell(f"lost rank {error.peer}: {error}".partition("\\n")[0])
    os._exit(1)
os._exit(0)
"""
LIMIT_SECONDS = 5


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces with a link, whose ends have the same names and 10.99.0.1 and 10.99.0.2."""
    names = [f"scale{os.getpid()}{letter}" for letter in "ab"]
    if sys.platform != "linux" or shutil.which("ip") is None:
        pytest.skip("there is no command `ip` to make network namespaces with")
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for number, name in enumerate(names, start=1):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"10.99.0.{number}/24", "dev", name)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", name, "up")
    except subprocess.CalledProcessError as error:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        pytest.skip(f"network namespaces can't be made here: {error.stderr.decode().strip()}")
    yield names
    for name in names:
        inside = subprocess.run(["ip", "netns", "pids", name], check=True, capture_output=True).stdout.split()
        subprocess.run(["kill", "-9", *inside], check=False, capture_output=True)
        ip("netns", "del", name)


def start_agent(
    folder: Path, number: int, endpoint: str, *options: str, before: Sequence[str] = (), **settings: str
) -> subprocess.Popen[bytes]:
    command = [*before, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", "--rdzv-id=job", f"--rdzv-endpoint={endpoint}", "--monitor-interval=0.2"]
    command += [f"--rdzv-conf=is_host={int(number == 1)},last_call_timeout=3", *options]
    settings = {"SCALE_LIMIT_SECONDS": str(LIMIT_SECONDS), "OMP_NUM_THREADS": "1", **settings}
    with (folder / f"agent-{number}").open("wb") as output:
        return subprocess.Popen(
            [*command, str(folder / "job.py"), str(folder)],
            env={**os.environ, **settings},
            stdout=output,
            stderr=output,
        )


def start_agent_on(folder: Path, host: str, number: int) -> subprocess.Popen[bytes]:
    inside = ["ip", "netns", "exec", host]
    options = ["--nnodes=2", f"--local-addr=10.99.0.{number}"]
    return start_agent(folder, number, "10.99.0.1:29555", *options, before=inside, GLOO_SOCKET_IFNAME=host)


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


def lines(file: Path, beginning: str) -> list[str]:
    return [line for line in file.read_text().splitlines() if line.startswith(beginning)] if file.exists() else []


@pytest.mark.soak
def test_two_machines_name_each_other_where_their_link_is_cut(hosts: list[str], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)

    def said(rank: int, beginning: str) -> list[str]:
        return lines(tmp_path / f"rank-{rank}", beginning)

    def both(beginning: str, count: int = 1) -> Callable[[], bool]:
        return lambda: all(len(said(rank, beginning)) >= count for rank in range(2))

    agents = [start_agent_on(tmp_path, host, number) for number, host in enumerate(hosts, start=1)]
    try:
        wait_until(both("step", 3), "both train", 300)
        ip("-n", hosts[0], "link", "set", hosts[0], "down")
        wait_until(both("lost rank"), "both notice", 60 + 4 * LIMIT_SECONDS)
        for rank in range(2):
            (line,) = said(rank, "lost rank")
            assert line.startswith(f"lost rank {1 - rank}: ") and "failed: no answer within 5 s" in line
        last = int(said(0, "step")[-1].split()[1])
        ip("-n", hosts[0], "link", "set", hosts[0], "up")
        wait_until(both("resumed"), "both resume", 300)
        for rank in range(2):
            assert int(said(rank, "resumed")[0].split()[-1]) in (last - 1, last, last + 1)
        (tmp_path / "enough").touch()
        for agent in agents:
            agent.wait(timeout=300)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


@pytest.mark.fault(16)
@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="ranks end with torchrun's agent as Linux has it")
def test_a_machine_may_come_later_and_go_again(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    endpoint = f"127.0.0.1:{free_port()}"

    def start(number: int) -> subprocess.Popen[bytes]:
        # torch's agents end with an error when another one comes, unless they share no store with their ranks.
        settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "TELLS": f"machine-{number}"}
        return start_agent(tmp_path, number, endpoint, "--nnodes=1:2", **settings)

    def has_said(number: int, beginning: str, count: int = 1) -> Callable[[], bool]:
        return lambda: len(lines(tmp_path / f"machine-{number}", beginning)) >= count

    agents = [start(1)]
    try:
        wait_until(has_said(1, "step", 3), "one trains", 300)
        agents.append(start(2))
        for number in (1, 2):
            wait_until(has_said(number, "resumed on 2 after"), "both go on", 300)
        wait_until(has_said(2, "step", 3), "both train", 300)
        agents[1].kill()
        wait_until(has_said(1, "lost rank"), "the one that stays notices", 60 + 4 * LIMIT_SECONDS)
        last = int(lines(tmp_path / "machine-1", "step")[-1].split()[1])
        wait_until(has_said(1, "resumed on 1 after"), "it goes on alone", 300)
        assert int(lines(tmp_path / "machine-1", "resumed on 1")[0].split()[-1]) in (last - 1, last, last + 1)
        (tmp_path / "enough").touch()
        assert agents[0].wait(timeout=300) == 0
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
