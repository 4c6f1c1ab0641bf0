"""Two machines, network namespaces here, with an agent of torchrun each, and a link between them that is cut."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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
from scale_core.snapshot import latest_snapshot, load_snapshot, save_snapshot
from scale_core.state import load_sharded_state_dict, sharded_state_dict, target_state_dict
from scale_fsdp import fully_shard

folder = Path(sys.argv[1])
group = init_distributed(device="cpu")

def tell(line):
    with (folder / f"rank-{group.rank}").open("a") as file:
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
        tell(f"resumed after {step}")
    while not CollectiveCall(group, "going on", RuntimeError).rank0((folder / "enough").exists):
        torch.manual_seed(1000 + step)
        model(torch.randn(4, 8)[2 * group.rank : 2 * group.rank + 2]).square().mean().backward()
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


def start_agent(folder: Path, host: str, number: int) -> subprocess.Popen[bytes]:
    command = ["ip", "netns", "exec", host, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
    command += ["--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=job"]
    command += ["--rdzv-endpoint=10.99.0.1:29555", f"--rdzv-conf=is_host={int(number == 1)}"]
    command += [f"--local-addr=10.99.0.{number}", "--monitor-interval=0.2", str(folder / "job.py"), str(folder)]
    settings = {"GLOO_SOCKET_IFNAME": host, "SCALE_LIMIT_SECONDS": str(LIMIT_SECONDS), "OMP_NUM_THREADS": "1"}
    with (folder / f"agent-{number}").open("wb") as output:
        return subprocess.Popen(command, env={**os.environ, **settings}, stdout=output, stderr=output)


def wait_until(condition: Callable[[], bool], what: str, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


@pytest.mark.soak
def test_when_the_link_between_two_machines_is_cut_both_name_the_other_and_resume_when_it_is_back(
    hosts: list[str], tmp_path: Path
) -> None:
    (tmp_path / "job.py").write_text(JOB)

    def said(rank: int, beginning: str) -> list[str]:
        file = tmp_path / f"rank-{rank}"
        return [line for line in file.read_text().splitlines() if line.startswith(beginning)] if file.exists() else []

    def both(beginning: str, count: int = 1) -> Callable[[], bool]:
        return lambda: all(len(said(rank, beginning)) >= count for rank in range(2))

    agents = [start_agent(tmp_path, host, number) for number, host in enumerate(hosts, start=1)]
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
