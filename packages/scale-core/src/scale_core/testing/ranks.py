"""Runs a function on N ranks and returns the results, or raises what the first failing rank raised.

A test of parallel code must be as cheap to write and as plain to read as any other test. So the ranks start fast
(forked from a server that has imported torch already), share only picklable arguments with the test, fail with the
exception that really happened, and never outlive the call: a rank that hangs is killed after the timeout, and the error
shows its stack.
"""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import re
import reprlib
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar, cast

from scale_core.errors import renamed_arguments
from scale_core.launch.launcher import (
    UNGUARDED,
    check_may_start,
    format_exit_code,
    kill_all,
    lacks_main_guard,
    main_hidden,
)
from scale_core.launch.rendezvous import open_store
from scale_core.shard import as_local
from scale_core.testing.rank import Filter, RankError, RankFailure, RankTask, run_rank

__all__ = ["RankError", "preload", "run_ranks", "scaled_by_load"]

T = TypeVar("T")

# Imported once in the server. The first step of an optimizer imports torch._dynamo, and saving imports torch's
# checkpoint package: a second for each, which otherwise every rank of every call would spend again.
_PRELOADED = [
    "torch",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "scale_core.testing.ranks",
]
# How long the others may take to report, once one rank has failed: what they saw is not what went wrong.
_GRACE_SECONDS = 1.0
_QUOTED_LINES = 20  # of a dead rank's output


def run_test(test: Callable[..., object], arguments: Mapping[str, Any], sees_local_tensors: bool = False) -> None:
    """Calls a test on a rank. A failed assertion gets the test's variables as a note: pytest rewrites none there."""
    try:
        with as_local() if sees_local_tensors else nullcontext():
            test(**arguments)
    except AssertionError as error:
        code = inspect.unwrap(test).__code__
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code is code]
        variables = [f"{name} = {reprlib.repr(value)}" for frame in frames for name, value in frame.f_locals.items()]
        error.add_note("\n".join(["the test had:", *variables]))
        raise


def preload(*modules: str) -> None:
    """Names modules that the ranks need, to be imported once for all of them; without effect after the first run.

    Args:
        *modules: Names of modules; one that can't be imported is left out.

    Examples:
        >>> from scale_core.testing import preload
        >>> preload("torch.nn.utils")  # imported once, before ranks are forked

    See also: [the guide to comparing with one process](../guides/check.md).
    """
    _PRELOADED.extend(name for name in modules if name not in _PRELOADED)


def scaled_by_load(seconds: float) -> float:
    """Returns a limit for a test in which ranks wait in vain: longer where the machine has more to do than cores.

    Args:
        seconds: The limit on a quiet machine.
    """
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 1.0
    return seconds * max(1.0, load / (os.cpu_count() or 1))


@renamed_arguments(timeout="limit_seconds=")
def run_ranks(
    fn: Callable[..., T], num_ranks: int, *args: Any, limit_seconds: float = 600.0, backend: str | None = "gloo"
) -> list[T]:
    """Runs `fn(*args)` on each of `num_ranks` processes and returns their results by rank.

    Inside `fn` the default process group is initialized, torch uses one thread, and the caller's environment and
    warning filters hold. A `ResourceWarning` is a failure, because scale gives one for a collective without `wait()`.

    Args:
        fn: A function at the top level of a module.
        num_ranks: The number of processes, at least 1.
        *args: Given to `fn` on every rank; like the results, they must be picklable.
        limit_seconds: The limit of all ranks together, after which they are killed. The default suits a busy machine.
        backend: The backend of the default group. With None, torch.distributed is not initialized.

    Raises:
        Exception: What the first failing rank raised, with its rank, traceback and output as notes.
        RankError: A rank died without a result (the error names the signal), or its exception can't be pickled; or the
            main script calls this outside of `if __name__ == "__main__"`.
        TimeoutError: The limit passed; the error shows the stack of every rank that was still running.
        ValueError: `num_ranks` is below 1, or `fn` is in no file, as one of a notebook, or not at the top level of one.

    Example:
        >>> from operator import add
        >>> run_ranks(add, 2, 20, 22, backend=None)
        [42, 42]

    See also: [the guide to comparing with one process](../guides/check.md).
    """
    if num_ranks < 1:
        raise ValueError(f"expected num_ranks of at least 1, got {num_ranks}")
    check_may_start("run_ranks", fn)
    store = None if backend is None else open_store("127.0.0.1", 0, serve=True, timeout=limit_seconds)
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder:
        task = RankTask(
            call=pickle.dumps((fn, args)),
            num_ranks=num_ranks,
            folder=Path(folder),
            port=0 if store is None else store.port,
            backend=backend,
            timeout=limit_seconds,
            environment=dict(os.environ),
            filters=_current_filters(),
        )
        ranks = _start(task)
        try:
            _supervise(ranks, task)
        finally:
            kill_all(ranks)
            _replay_output(task)
        return [pickle.loads(task.path(rank, "result").read_bytes()) for rank in range(num_ranks)]


def _start(task: RankTask) -> list[BaseProcess]:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(_PRELOADED)
    ranks: list[BaseProcess] = []
    with main_hidden(unless=b"__main__" in task.call):
        for rank in range(task.num_ranks):
            process = context.Process(target=run_rank, args=(task, rank), name=f"rank {rank}")  # type: ignore[attr-defined]
            process.start()
            ranks.append(process)
    return ranks


def _supervise(ranks: Sequence[BaseProcess], task: RankTask) -> None:
    """Returns when every rank has ended with a result; raises the first failure otherwise."""
    deadline = time.monotonic() + task.timeout
    failing = False
    while running := [process for process in ranks if process.exitcode is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            if failing:
                break
            raise TimeoutError(_stacks(ranks, task))
        wait_for_any([process.sentinel for process in running], timeout=left)
        if not failing and any(
            process.exitcode is not None and not task.path(rank, "result").exists()
            for rank, process in enumerate(ranks)
        ):
            failing = True
            deadline = min(deadline, time.monotonic() + scaled_by_load(_GRACE_SECONDS))
    failures = [failure for rank, process in enumerate(ranks) if (failure := _failure_of(rank, process, task))]
    if failures:
        raise min(failures, key=lambda failure: (failure.is_consequence, failure.when)).error


def _failure_of(rank: int, process: BaseProcess, task: RankTask) -> RankFailure | None:
    if process.exitcode is None or task.path(rank, "result").exists():
        return None  # An abort after the result (torch's gloo sometimes does at its teardown) is no failure.
    if (path := task.path(rank, "failure")).exists():
        failure: RankFailure = pickle.loads(path.read_bytes())
        return failure
    if process.exitcode == UNGUARDED:
        return RankFailure(time.monotonic(), RankError(lacks_main_guard("run_ranks")), False)
    error = RankError(
        f"rank {rank} of {task.num_ranks} {format_exit_code(process.exitcode)} before its function returned"
    )
    if output := _output(task, rank):
        error.add_note("\n".join([f"rank {rank} had printed:", *output.splitlines()[-_QUOTED_LINES:]]))
    return RankFailure(time.monotonic(), error, False)


def _stacks(ranks: Sequence[BaseProcess], task: RankTask) -> str:
    lines = [f"the limit of {task.timeout:g} s passed before all {task.num_ranks} ranks had returned"]
    for process in ranks:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
    for rank in range(task.num_ranks):
        if task.path(rank, "result").exists():
            lines.append(f"rank {rank}: had returned")
        else:
            stack = _wait_for_text(task.path(rank, "stack"))
            lines.append(f"rank {rank}: was here (innermost call first)\n{stack or '  no answer: frozen, or not up'}")
    return "\n".join(lines)


def _wait_for_text(path: Path, seconds: float = 1.0) -> str:
    """The text of a file that another process writes, once it has stopped growing."""
    text, deadline = "", time.monotonic() + seconds
    while time.monotonic() < deadline:
        before, text = text, path.read_text() if path.exists() else ""
        if text and text == before:
            break
        time.sleep(0.02)
    return text


def _replay_output(task: RankTask) -> None:
    for rank in range(task.num_ranks):
        sys.stdout.write(_output(task, rank))


def _output(task: RankTask, rank: int) -> str:
    path = task.path(rank, "output")
    return path.read_text(errors="replace") if path.exists() else ""


def _current_filters() -> list[Filter]:
    filters = []
    for action, message, category, module, lineno in warnings.filters:
        name = cast(type, category).__module__, cast(type, category).__qualname__
        filters.append(Filter(action, _pattern(message), name, _pattern(module), lineno))
    return filters


def _pattern(part: re.Pattern[str] | str | None) -> str:
    """What a filter matches, as text: Python's own filters hold plain strings, meant literally."""
    return part.pattern if isinstance(part, re.Pattern) else re.escape(part or "")
