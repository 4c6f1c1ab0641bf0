"""fork.py: a process that is forked from a rank is told at its first collective, and the ranks go on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from scale_core.comm.collectives import all_gather, all_reduce, exchange
from scale_core.comm.group import group_of
from scale_core.errors import LaunchError
from scale_core.testing import run_ranks


def in_fork(call: Callable[[], object]) -> str:
    """Calls a function in a forked process; returns what it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            call()
            message = "nothing"
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        os.write(writer, message.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def forks() -> list[str]:
    group = group_of()
    ones = torch.ones(4)
    all_reduce(ones.clone(), group).wait()
    said = []
    if group.rank == 0:
        said.append(in_fork(lambda: all_reduce(ones.clone(), group)))
        said.append(in_fork(lambda: exchange([1], group)))
        said.append(in_fork(lambda: all_reduce(ones.clone(), group_of(dist.group.WORLD))))
    under_way = all_gather(torch.empty(8), ones, group)
    if group.rank == 0:
        said.append(in_fork(under_way.wait))
        said.append(in_fork(under_way.cancel))
    assert under_way.wait().sum() == 8
    assert all_reduce(ones.clone(), group).wait().sum() == 8
    return said


@pytest.mark.fault(99)
def test_a_fork_of_a_rank_is_told_and_the_ranks_go_on() -> None:
    said, _ = run_ranks(forks, 2)
    *told, canceled = said
    assert len(told) == 4 and canceled == "nothing"
    for message in told:
        assert message.startswith("LaunchError: process ") and "was forked from process" in message
        assert 'multiprocessing.get_context("spawn")' in message


def train_in_a_fork() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    exchange([1], group_of())
    raise LaunchError("trained")


def test_a_process_forked_before_it_has_a_group_may_build_one() -> None:
    assert in_fork(train_in_a_fork) == "LaunchError: trained"


PROGRAM = """
import os
import sys

import torch
import torch.distributed as dist
from scale_core.comm.collectives import all_reduce
from scale_core.comm.group import group_of
from scale_core.launch import init_distributed

init_distributed("gloo")
group = group_of()
all_reduce(torch.ones(4), group).wait()
if dist.get_rank() == 0:
    if not (child := os.fork()):
        all_reduce(torch.ones(4), group)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
total = int(all_reduce(torch.ones(1), group).wait())
if dist.get_rank() == 0:
    print(f"child: {code}, sum: {total}", flush=True)
dist.barrier()
os._exit(0)  # torch's own end of a gloo group aborts now and then, without a fork too.
"""


@pytest.mark.fault(99)
def test_a_fork_ends_with_its_error_and_the_program_goes_on(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert "child: 1, sum: 2" in run.stdout.split("\n")  # torch 2.8 prints lines of gloo before it.
    assert "LaunchError: process " in run.stderr
