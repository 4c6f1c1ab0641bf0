"""A process for each rank that makes the imports of a script once, and forks for each run of it.

A check runs the script in four processes or more, and of a short run imports take most of the time. So torch is
imported before the first fork, and so is what the script imports first: see `imports`. Each rank has a process of its
own, so ranks still have other hashes and other addresses: an order that a script takes from a `set` is another one on
each rank, as under torchrun.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from scale_check.script import pickles
from scale_check.script.imports import import_for_script
from scale_check.script.rank import ScriptTask, run_task
from scale_core.launch.parent import die_with_parent

# Elsewhere libraries of the system have threads that don't survive a fork, and each run has a process of its own.
_FORKS = sys.platform == "linux"
# What the first optimizer of a process imports. It asks no device, so processes that are forked may use theirs.
_PRELOADED = "torch._dynamo"
_COMMAND = (sys.executable, "-m", "scale_check.script")


@dataclass(frozen=True)
class _Run:
    """One run of the script on a rank: what it is to do, with which environment, and where it says what."""

    task: ScriptTask
    environment: dict[str, str]
    output: Path
    code: Path


class ForkServer:
    """Runs tasks in processes that are forked from one that has imported torch; one task at a time.

    Args:
        output: Where that process says what it has to say, if it can't begin.
        script: The script of the tasks and its arguments, whose first imports are made once; empty for none.
    """

    def __init__(self, output: Path, script: Sequence[str] = ()) -> None:
        self._output = output
        self._script = script
        self._process: subprocess.Popen[bytes] | None = None
        self._run: _Run | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(self, task: ScriptTask, environment: dict[str, str], folder: Path, name: str) -> None:
        """Starts a run, whose files are in a folder; `poll` tells when it has ended."""
        task = replace(task, result=folder / f"result-{name}")
        run = self._run = _Run(task, environment, folder / f"output-{name}", folder / f"code-{name}")
        (folder / f"task-{name}").write_bytes(pickles.dumps(run))
        if self._process is None or not _FORKS:
            self.kill()
            self._process = self._new_process()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{folder / f'task-{name}'}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:  # It has ended; `poll` says so.
            pass

    def poll(self) -> int | None:
        """The exit code of the run, negative for a signal; None while it goes on."""
        assert self._run is not None and self._process is not None
        ended = self._process.poll()  # Before the file is looked for, which is written first.
        return int(self._run.code.read_text()) if self._run.code.exists() else ended

    def output(self) -> str:
        """What the run has said."""
        assert self._run is not None
        path = self._run.output if self._run.output.exists() else self._output
        return path.read_text(errors="replace") if path.exists() else ""

    def result(self) -> bytes:
        """What the run has written."""
        assert self._run is not None
        return self._run.task.result.read_bytes()

    def kill(self) -> None:
        """Ends the process, and with it a run."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _new_process(self) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        with self._output.open("wb") as output:
            return subprocess.Popen(
                [*_COMMAND, *self._script],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


def serve(script: Sequence[str]) -> None:
    """Runs the tasks whose files stdin names, until it ends.

    Args:
        script: As `ForkServer` takes it.
    """
    if _FORKS:
        importlib.import_module(_PRELOADED)
        environment, folder = dict(os.environ), os.getcwd()
        if script and not import_for_script(script):
            os.chdir(folder)
            os.execve(sys.executable, _COMMAND, environment)  # Drops what was imported; the process and its pipe stay.
    for line in sys.stdin:
        run: _Run = pickle.loads(Path(line.rstrip("\n")).read_bytes())
        if not _FORKS:
            _run_and_exit(run)
        parent = os.getpid()
        if pid := os.fork():
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            partial = run.code.with_suffix(".partial")
            partial.write_text(str(code))
            partial.rename(run.code)
        else:
            die_with_parent(parent)
            _run_and_exit(run)


def _run_and_exit(run: _Run) -> None:
    """Runs a task, and ends the process: past the ends of groups and threads that the script has been taken from."""
    code = 1
    try:
        with open(os.devnull) as nothing, run.output.open("wb") as output:
            os.dup2(nothing.fileno(), 0)
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
        os.environ.update(run.environment)
        code = run_task(run.task)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
