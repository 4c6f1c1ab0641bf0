"""A team of ranks that waits for orders: how several candidates take turns on one noisy machine.

Each candidate of a benchmark keeps its own ranks alive, warmed up and blocked in a read, which costs nothing; the
caller lets one team after the other do a few steps. A neighbor's load then falls on all candidates alike, and the
ratio of two of them within one turn is steady where seconds are not.

Ranks are forked by a nursery: a process that is started with the settings of the C allocator (they are read only
once, at its start) and has imported torch, which takes longer than all that a rank does before its first step.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import IO, Any, Self, cast

import torch
import torch.distributed as dist

# Freed memory stays with the process: no page is faulted in twice. What a launcher of training jobs sets.
ALLOCATOR_FOR_TIME = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647"}
# Every tensor above 64 KiB is a mapping of its own and leaves the process when it is freed: the resident size follows
# the tensors.
ALLOCATOR_FOR_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}

_stores = cast(Any, dist)  # torch.distributed exports its stores without saying so to a type checker.

Handlers = Mapping[str, Callable[..., dict[str, Any]]]


class TeamError(RuntimeError):
    """A rank answered with an error, or not at all."""


class Nursery:
    """The process that forks ranks. Its script must call `raise_ranks` when it is given `--nursery`.

    Args:
        script: What it runs.
        allocator: Settings of the C allocator, which its ranks inherit; those of the caller do not count.
    """

    def __init__(self, script: str, allocator: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair()
        others = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, script, "--nursery", str(theirs.fileno())],
                env={**others, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **allocator},
                pass_fds=[theirs.fileno()],
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.wait()

    def fork(self, place: Mapping[str, Any], log: IO[bytes]) -> socket.socket:
        """Starts one rank, whose output goes to `log`; returns the connection to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [json.dumps(place).encode()], [theirs.fileno(), log.fileno()])
            if self._socket.recv(1) != b"+":
                raise TeamError("the process that forks the ranks has ended")
        return ours


class Team:
    """The ranks of one candidate.

    Args:
        nursery: Forks them.
        order: What `raise_ranks` passes to its `start` function; JSON.
        world_size: The number of ranks.
        limit_seconds: The longest that one answer may take.
    """

    def __init__(
        self, nursery: Nursery, order: Mapping[str, Any], world_size: int = 2, limit_seconds: float = 400.0
    ) -> None:
        self.limit_seconds = limit_seconds
        self._store = _stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._logs = [tempfile.TemporaryFile() for _ in range(world_size)]  # noqa: SIM115 - the team closes them
        self._lines: list[IO[bytes]] = []
        self._sockets: list[socket.socket] = []
        for rank, log in enumerate(self._logs):
            place = {"rank": rank, "world_size": world_size, "port": self._store.port, "order": dict(order)}
            self._sockets.append(nursery.fork(place, log))
            self._lines.append(self._sockets[-1].makefile("rb"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: str, **arguments: Any) -> list[dict[str, Any]]:
        """Sends one request to all ranks and returns their answers by rank.

        Raises:
            TeamError: A rank raised, died, or took longer than the limit.
        """
        line = json.dumps({"request": request, "arguments": arguments}).encode() + b"\n"
        for connection in self._sockets:
            with suppress(OSError):  # It has died; reading its answer says so.
                connection.sendall(line)
        deadline = time.monotonic() + self.limit_seconds
        answers = [self._answer(rank, deadline) for rank in range(len(self._sockets))]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise TeamError(f"rank {rank}: {answer['error']}")
        return answers

    def close(self) -> None:
        """Lets the ranks end; one that still works on a request ends after it."""
        for connection, line, log in zip(self._sockets, self._lines, self._logs, strict=True):
            line.close()
            connection.close()
            log.close()

    def _answer(self, rank: int, deadline: float) -> dict[str, Any]:
        connection = self._sockets[rank]
        readable, _, _ = select.select([connection], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TeamError(f"rank {rank} did not answer within {self.limit_seconds:g} s")
        line = self._lines[rank].readline()
        if not line:
            self._logs[rank].seek(0)
            tail = "\n".join(self._logs[rank].read().decode(errors="replace").splitlines()[-15:])
            raise TeamError(f"rank {rank} died\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def raise_ranks(descriptor: int, start: Callable[[dict[str, Any]], Handlers]) -> int:
    """The nursery's side: forks a rank whenever it is told to, until its caller is gone.

    Args:
        descriptor: What followed `--nursery`.
        start: Builds, in the rank, what is measured, and returns a function per request.

    Returns:
        The exit code of the process.
    """
    torch.set_num_threads(1)
    torch.optim.Adam([torch.zeros(1, requires_grad=True)])  # Its first use imports half of torch.
    connection = socket.socket(fileno=descriptor)
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, 65536, 2)
        if not message:
            return 0
        if os.fork() == 0:
            connection.close()
            ours, log = descriptors
            for standard in (1, 2):
                os.dup2(log, standard)
            _serve(json.loads(message), socket.socket(fileno=ours), start)
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        connection.sendall(b"+")


def _serve(place: dict[str, Any], connection: socket.socket, start: Callable[[dict[str, Any]], Handlers]) -> None:
    """A rank's side: joins the group, starts, and answers requests until the caller is gone."""
    handlers: Handlers | None = None
    for line in connection.makefile("rb"):
        asked = json.loads(line)
        try:
            if handlers is None:
                _join(place)
                handlers = start(place["order"])
            answer = handlers[asked["request"]](**asked["arguments"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        connection.sendall(json.dumps(answer).encode() + b"\n")


def _join(place: Mapping[str, Any]) -> None:
    limit = timedelta(seconds=120)
    store = _stores.TCPStore("127.0.0.1", place["port"], is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=_stores.PrefixStore("group", store),
        rank=place["rank"],
        world_size=place["world_size"],
        timeout=limit,
    )
