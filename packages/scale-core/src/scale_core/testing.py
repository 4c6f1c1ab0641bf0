"""Run a function on N ranks and get what each returned, or what the first failing one raised.

A test of parallel code must be as cheap to write and as plain to read as any other test. So the ranks start fast
(forked from a server that has imported torch already), share nothing with the test but picklable arguments, fail with
the exception that really happened, and never outlive the call: a rank that hangs is killed when the limit passes, and
the error says where it was.
"""

from __future__ import annotations

import faulthandler
import gc
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist

from scale_core.launch import die_with_parent, name_of_exit
from scale_core.rendezvous import open_store, under_name

T = TypeVar("T")

# Imported once in the server. The first step of an optimizer imports torch._dynamo, and a snapshot torch's checkpoint
# package: a second for each, which otherwise every rank of every call would spend again.
_PRELOADED = ["torch", "torch.distributed.checkpoint", "torch._dynamo", "scale_core.testing", "scale_core.snapshot"]
# How long the others may take to report, once one rank has failed: what they saw is not what went wrong.
_GRACE_SECONDS = 1.0
# What a survivor of another rank's end reads; such an error is a consequence, never the cause.
_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "pair closure")


class RankError(RuntimeError):
    """A rank ended without a result, or raised something that can't be carried to the caller."""


def run_ranks(
    fn: Callable[..., T], num_ranks: int, *args: Any, timeout: float = 60.0, backend: str | None = "gloo"
) -> list[T]:
    """Runs `fn(*args)` on each of `num_ranks` processes and returns their results by rank.

    Inside `fn` the default process group is initialised, torch uses one thread, the caller's environment and warning
    filters hold, and a `ResourceWarning` (such as a collective that nobody waited for) is a failure.

    Args:
        fn: A function at the top level of a module.
        num_ranks: The number of processes, at least 1.
        *args: Given to `fn` on every rank; like the results, they must be picklable.
        timeout: Seconds for all of it; then every rank is killed.
        backend: The backend of the default group, or None to leave torch.distributed alone.

    Raises:
        Exception: What the first failing rank raised, with its rank, traceback and output as notes.
        RankError: A rank died without a result (the error names the signal), or its exception can't be pickled.
        TimeoutError: The limit passed; the error shows the stack of every rank that was still running.
        ValueError: `num_ranks` is below 1.

    Example:
        >>> from operator import add
        >>> run_ranks(add, 2, 20, 22, backend=None)
        [42, 42]
    """
    if num_ranks < 1:
        raise ValueError(f"expected num_ranks of at least 1, got {num_ranks}")
    store = None if backend is None else open_store("127.0.0.1", 0, serve=True, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="run_ranks-") as folder:
        order = _Order(
            call=pickle.dumps((fn, args)),
            rank=0,
            num_ranks=num_ranks,
            folder=Path(folder),
            port=0 if store is None else store.port,
            backend=backend,
            timeout=timeout,
            environment=dict(os.environ),
            filters=_current_filters(),
        )
        ranks = _start(order)
        try:
            _supervise(ranks, order)
        finally:
            _end(ranks)
            _replay_output(order)
        return [pickle.loads(order.of(rank).result.read_bytes()) for rank in range(num_ranks)]


class _Filter(NamedTuple):
    """One entry of `warnings.filters`; the category by name, because its module may be absent in a rank."""

    action: Any
    message: str
    category: tuple[str, str]
    module: str
    lineno: int


@dataclass(frozen=True)
class _Order:
    """What one rank is told. It answers through files in `folder`, which outlive it whatever happens to it."""

    call: bytes
    rank: int
    num_ranks: int
    folder: Path
    port: int
    backend: str | None
    timeout: float
    environment: dict[str, str]
    filters: list[_Filter]

    def of(self, rank: int) -> _Order:
        return replace(self, rank=rank)

    @property
    def result(self) -> Path:
        return self.folder / f"{self.rank}.result"

    @property
    def failure(self) -> Path:
        return self.folder / f"{self.rank}.failure"

    @property
    def stack(self) -> Path:
        return self.folder / f"{self.rank}.stack"

    @property
    def output(self) -> Path:
        return self.folder / f"{self.rank}.output"


class _Failure(NamedTuple):
    """What a rank reports of its end. `when` is on the system's monotonic clock, in seconds."""

    when: float
    error: BaseException
    is_consequence: bool


# ---------------------------------------------------------------------------------------------- the caller's side


def _start(order: _Order) -> list[BaseProcess]:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(_PRELOADED)
    ranks: list[BaseProcess] = []
    with _main_hidden(unless=b"__main__" in order.call):
        for rank in range(order.num_ranks):
            process = context.Process(target=_play, args=(order.of(rank),), name=f"rank {rank}")  # type: ignore[attr-defined]
            process.start()
            ranks.append(process)
    return ranks


@contextmanager
def _main_hidden(unless: bool) -> Iterator[None]:
    """Keeps multiprocessing from running the caller's main script (often pytest itself) again in every rank."""
    main = sys.modules["__main__"]
    if not unless:
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _supervise(ranks: Sequence[BaseProcess], order: _Order) -> None:
    """Returns when every rank has ended with a result; raises what went wrong otherwise."""
    deadline = time.monotonic() + order.timeout
    failing = False
    while running := [process for process in ranks if process.exitcode is None]:
        left = deadline - time.monotonic()
        if left <= 0:
            if failing:
                break
            raise TimeoutError(_where_they_were(ranks, order))
        wait_for_any([process.sentinel for process in running], timeout=left)
        if not failing and any(
            process.exitcode is not None and not order.of(rank).result.exists() for rank, process in enumerate(ranks)
        ):
            failing = True
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    failures = [failure for rank, process in enumerate(ranks) if (failure := _failure_of(rank, process, order))]
    if failures:
        raise min(failures, key=lambda failure: (failure.is_consequence, failure.when)).error


def _failure_of(rank: int, process: BaseProcess, order: _Order) -> _Failure | None:
    mine = order.of(rank)
    if process.exitcode is None or mine.result.exists():
        return None  # An abort after the result (torch's gloo sometimes does at its teardown) is no failure.
    if mine.failure.exists():
        failure: _Failure = pickle.loads(mine.failure.read_bytes())
        return failure
    error = RankError(f"rank {rank} of {order.num_ranks} {name_of_exit(process.exitcode)} before its function returned")
    if output := _tail(mine.output):
        error.add_note(f"rank {rank} had printed:\n{output}")
    return _Failure(time.monotonic(), error, False)


def _where_they_were(ranks: Sequence[BaseProcess], order: _Order) -> str:
    lines = [f"the limit of {order.timeout:g} s passed before all {order.num_ranks} ranks had returned"]
    for process in ranks:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
    for rank in range(order.num_ranks):
        mine = order.of(rank)
        if mine.result.exists():
            lines.append(f"rank {rank}: had returned")
        else:
            stack = _wait_for_text(mine.stack)
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


def _end(ranks: Sequence[BaseProcess]) -> None:
    for process in ranks:
        if process.exitcode is None:
            process.kill()
    for process in ranks:
        process.join()
        process.close()


def _replay_output(order: _Order) -> None:
    for rank in range(order.num_ranks):
        path = order.of(rank).output
        if path.exists() and (text := path.read_text(errors="replace")):
            sys.stdout.write(text)


def _tail(path: Path, num_lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:]) if path.exists() else ""


def _current_filters() -> list[_Filter]:
    return [
        _Filter(
            action,
            _pattern(message),
            (cast(type, category).__module__, cast(type, category).__qualname__),
            _pattern(module),
            lineno,
        )
        for action, message, category, module, lineno in warnings.filters
    ]


def _pattern(part: re.Pattern[str] | str | None) -> str:
    """What a filter matches, as text: Python's own filters hold plain strings, meant literally."""
    return part.pattern if isinstance(part, re.Pattern) else re.escape(part or "")


# ------------------------------------------------------------------------------------------------ the rank's side


def _play(order: _Order) -> NoReturn:
    """A rank's whole life: set up, call, answer, leave."""
    die_with_parent()
    _redirect_output(order.output)
    with order.stack.open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        unraisable: list[BaseException] = []
        sys.unraisablehook = lambda args: unraisable.append(args.exc_value or RuntimeError(str(args.err_msg)))
        threading.excepthook = lambda args: unraisable.append(args.exc_value or RuntimeError(str(args.exc_type)))
        code = 0
        try:
            store = _set_up(order)
            fn, args = pickle.loads(order.call)
            result = fn(*args)
            gc.collect()
            if unraisable:
                raise unraisable[0]
            _write(order.result, pickle.dumps(result))
            _leave(store, order)
        except BaseException as error:  # A test may raise anything, pytest's own outcomes included.
            code = 1
            if not order.result.exists():
                _write(order.failure, _packed(error, order))
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # Past every finaliser: a thread of the transport may not end, or abort the process.


def _set_up(order: _Order) -> Any:
    os.environ.clear()
    os.environ.update(order.environment)
    torch.set_num_threads(1)
    _apply_filters(order.filters)
    if order.backend is None:
        return None
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = open_store("127.0.0.1", order.port, serve=False, timeout=order.timeout)
    dist.init_process_group(
        order.backend,
        store=under_name("group", store),
        rank=order.rank,
        world_size=order.num_ranks,
        timeout=timedelta(seconds=order.timeout),
    )
    return store


def _apply_filters(filters: Sequence[_Filter]) -> None:
    warnings.resetwarnings()
    for entry in reversed(filters):
        category = getattr(sys.modules.get(entry.category[0]), entry.category[1], None)
        if isinstance(category, type) and issubclass(category, Warning):
            warnings.filterwarnings(entry.action, entry.message, category, entry.module, entry.lineno)
    warnings.filterwarnings("error", category=ResourceWarning)


def _leave(store: Any, order: _Order) -> None:
    """Waits for the others, so that no rank closes a connection that another one still reads; then closes."""
    if store is None:
        return
    if store.add("returned", 1) == order.num_ranks:
        store.set("all returned", "")
    store.wait(["all returned"])
    if dist.is_initialized():
        dist.destroy_process_group()


def _packed(error: BaseException, order: _Order) -> bytes:
    text = "".join(traceback.format_exception(error))
    failure = _Failure(time.monotonic(), error, any(words in str(error) for words in _LOST_PEER))
    note = f"raised on rank {order.rank} of {order.num_ranks}:\n{text}"
    error.add_note(note)
    try:
        packed = pickle.dumps(failure)
        pickle.loads(packed)  # Exceptions with their own constructor often pickle and then fail to unpickle.
    except Exception:
        carried = RankError(f"rank {order.rank} of {order.num_ranks} raised {type(error).__name__}: {error}")
        carried.add_note(note)
        packed = pickle.dumps(failure._replace(error=carried))
    return packed


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(path)


def _redirect_output(path: Path) -> None:
    """Into a file: the server that forked us may still write into a terminal, or a pipe, that is long gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
