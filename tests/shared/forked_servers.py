"""`scale-check run` with rank processes that are forked from the server of `run_ranks`, which has imported torch.

Otherwise each check starts two processes that import torch. The times are in tests/DESIGN.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_all_start_methods, get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from scale_check.script.fork_server import ForkServer, serve
from scale_core.launch.launcher import main_hidden
from scale_core.testing import ranks

ranks.preload("scale_check.script.fork_server")


class ForkedProcess:
    """The methods of `subprocess.Popen` that `ForkServer` calls."""

    def __init__(self, script: Sequence[str], output: Path) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(ranks._PRELOADED)
        reader, writer = context.Pipe(duplex=False)
        with main_hidden(unless=False):
            arguments = (reader, output, os.getcwd(), dict(os.environ), script)
            self._process = context.Process(target=_serve, args=arguments)
            self._process.start()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "wb")
        reader.close()
        writer.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def communicate(self) -> None:
        self._process.join()
        self.stdin.close()


def _serve(reader: Connection, output: Path, folder: str, variables: Mapping[str, str], script: Sequence[str]) -> None:
    os.dup2(reader.fileno(), 0)
    with output.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    sys.stdin = os.fdopen(0)
    serve(script)


@pytest.fixture
def script_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the test's folder the current one, and removes environment variables that a script would read."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("PYTHONWARNINGS", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def forked_servers(script_folder: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the servers of `scale-check run`, in `script_folder`."""
    if "forkserver" in get_all_start_methods():
        monkeypatch.setattr(ForkServer, "_new_process", lambda server: ForkedProcess(server._script, server._output))
