"""A team of ranks that waits for orders: how several candidates take turns on one noisy machine.

Each candidate of a benchmark keeps its own ranks alive, warmed up and blocked in a read, which costs nothing; the
caller lets one team after the other do a few steps. A neighbour's load then falls on all candidates alike, and the
ratio of two of them within one turn is steady where seconds are not. Ranks are started by exec and not by fork,
because the settings of the C allocator are read only once, at the start of a process.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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


class TeamError(RuntimeError):
    """A rank answered with an error, or not at all."""


class Team:
    """Ranks of one candidate, each running `python SCRIPT --rank ORDER`, where ORDER reaches `serve`'s handlers.

    Args:
        script: The file that calls `serve` when it is given `--rank`.
        order: What `serve` passes to its `start` function; JSON.
        allocator: Settings of the C allocator, for the environment of the ranks.
        world_size: The number of ranks.
        limit_seconds: The longest that one answer may take.
    """

    def __init__(
        self,
        script: str,
        order: Mapping[str, Any],
        allocator: Mapping[str, str],
        world_size: int = 2,
        limit_seconds: float = 300.0,
    ) -> None:
        self.limit_seconds = limit_seconds
        self._store = _stores.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._logs: list[IO[bytes]] = []
        self._ranks: list[subprocess.Popen[bytes]] = []
        for rank in range(world_size):
            place = {"rank": rank, "world_size": world_size, "port": self._store.port}
            log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the team
            self._logs.append(log)
            self._ranks.append(
                subprocess.Popen(
                    [sys.executable, script, "--rank", json.dumps({"place": place, "order": dict(order)})],
                    env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **allocator},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )
            )

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
        for process in self._ranks:
            assert process.stdin is not None
            try:
                process.stdin.write(line)
                process.stdin.flush()
            except BrokenPipeError:
                pass  # It has died; reading its answer says how.
        deadline = time.monotonic() + self.limit_seconds
        answers = [self._answer(rank, deadline) for rank in range(len(self._ranks))]
        for rank, answer in enumerate(answers):
            if "error" in answer:
                raise TeamError(f"rank {rank}: {answer['error']}")
        return answers

    def close(self) -> None:
        """Ends the ranks."""
        for process in self._ranks:
            process.kill()
        for process in self._ranks:
            process.communicate()
        for log in self._logs:
            log.close()

    def _answer(self, rank: int, deadline: float) -> dict[str, Any]:
        process = self._ranks[rank]
        assert process.stdout is not None
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        if not readable:
            raise TeamError(f"rank {rank} did not answer within {self.limit_seconds:g} s")
        line = process.stdout.readline()
        if not line:
            self._logs[rank].seek(0)
            tail = "\n".join(self._logs[rank].read().decode(errors="replace").splitlines()[-15:])
            raise TeamError(f"rank {rank} ended with code {process.wait()}\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer


Handlers = Mapping[str, Callable[..., dict[str, Any]]]


def serve(argument: str, start: Callable[[dict[str, Any]], Handlers]) -> int:
    """The rank's side: joins the group, calls `start(order)`, then answers requests until the caller is gone.

    A rank ends when its input does, so none outlives a caller that was killed by more than the request under way.

    Args:
        argument: What followed `--rank`.
        start: Builds what is measured and returns a function per request.

    Returns:
        The exit code of the process.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # What libraries print goes to the log and not between the answers.
    told = json.loads(argument)
    place = told["place"]
    torch.set_num_threads(1)
    handlers: Handlers = {}
    started = False
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            if not started:
                _join(place)
                handlers = start(told["order"])
                started = True
            answer = handlers[asked["request"]](**asked["arguments"])
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    return 0


def _join(place: Mapping[str, Any]) -> None:
    if dist.is_initialized():
        return
    limit = timedelta(seconds=120)
    store = _stores.TCPStore("127.0.0.1", place["port"], is_master=False, timeout=limit)
    dist.init_process_group(
        "gloo",
        store=_stores.PrefixStore("group", store),
        rank=place["rank"],
        world_size=place["world_size"],
        timeout=limit,
    )
