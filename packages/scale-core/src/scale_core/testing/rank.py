"""The main function of a rank that `run_ranks` has started.

A rank may be killed, hang or abort at any point, so it answers through files, which outlive it. It takes on the
caller's environment and warning filters, treats errors from destructors and threads as failures, and exits without
finalizers.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from scale_core import fault_points
from scale_core.errors import ScaleError
from scale_core.launch.parent import die_with_parent
from scale_core.launch.rendezvous import open_store, prefixed
from scale_core.testing.async_gloo import rank_backend

# What a survivor of another rank's end reads; such an error is a consequence, never the cause.
_LOST_PEER = ("closed by peer", "reset by peer", "Broken pipe", "pair closure", "has closed the connection")


class RankError(ScaleError):
    """A rank ended without a result, or raised something that can't be carried to the caller.

    See also: [what to do about a RankError](../guides/troubleshooting.md#rankerror).
    """


class Filter(NamedTuple):
    """One entry of `warnings.filters`; the category by name, because its module may be absent in a rank."""

    action: Any
    message: str
    category: tuple[str, str]
    module: str
    lineno: int


@dataclass(frozen=True)
class RankTask:
    """What every rank is to do; the files of the ranks in `folder` outlive them."""

    call: bytes
    num_ranks: int
    folder: Path
    port: int
    backend: str | None
    timeout: float
    environment: dict[str, str]
    filters: list[Filter]

    def path(self, rank: int, content: Literal["result", "failure", "stack", "output"]) -> Path:
        """A file of a rank: its pickled result or `RankFailure`, its stack (at the signal USR1), all that it prints."""
        return self.folder / f"{rank}.{content}"


class RankFailure(NamedTuple):
    """The failure of a rank. `when` is on the system's monotonic clock, in seconds."""

    when: float
    error: BaseException
    is_consequence: bool


def run_rank(task: RankTask, rank: int) -> NoReturn:
    """Runs a rank: set up, call, report, exit."""
    die_with_parent()
    gc.freeze()  # A collection then leaves out all that the server has imported, and its pages stay shared.
    _redirect_output(task.path(rank, "output"))
    with task.path(rank, "stack").open("w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        unraisable: list[BaseException] = []
        sys.unraisablehook = lambda args: unraisable.append(args.exc_value or RuntimeError(str(args.err_msg)))
        threading.excepthook = lambda args: unraisable.append(args.exc_value or RuntimeError(str(args.exc_type)))
        code = 0
        try:
            store = _set_up(task, rank)
            fn, args = pickle.loads(task.call)
            result = fn(*args)
            gc.collect()
            if unraisable:
                raise unraisable[0]
            _write(task.path(rank, "result"), pickle.dumps(result))
            _shut_down(store, task)
        except BaseException as error:  # A test may raise anything, pytest's own outcomes included.
            code = 1
            if not task.path(rank, "result").exists():
                _write(task.path(rank, "failure"), _pickled(error, f"rank {rank} of {task.num_ranks}"))
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # Past every finalizer: a thread of the transport may not end, or abort the process.


def _set_up(task: RankTask, rank: int) -> Any:
    os.environ.clear()
    os.environ.update(task.environment)
    fault_points.read_environment()
    torch.set_num_threads(1)
    _apply_filters(task.filters)
    if task.backend is None:
        return None
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = open_store("127.0.0.1", task.port, serve=False, timeout=task.timeout)
    dist.init_process_group(
        rank_backend(task.backend),
        store=prefixed("group", store),
        rank=rank,
        world_size=task.num_ranks,
        timeout=timedelta(seconds=task.timeout),
    )
    return store


def _apply_filters(filters: Sequence[Filter]) -> None:
    warnings.resetwarnings()
    for entry in reversed(filters):
        category = getattr(sys.modules.get(entry.category[0]), entry.category[1], None)
        if isinstance(category, type) and issubclass(category, Warning):
            warnings.filterwarnings(entry.action, entry.message, category, entry.module, entry.lineno)
    warnings.filterwarnings("error", category=ResourceWarning)


def _shut_down(store: Any, task: RankTask) -> None:
    """Waits for the other ranks, so that no rank closes a connection that another one still reads; then closes."""
    if fault_points.active is not None:
        fault_points.active("teardown", "")
    if store is None:
        return
    if store.add("returned", 1) == task.num_ranks:
        store.set("all returned", "")
    store.wait(["all returned"])
    if dist.is_initialized():
        dist.destroy_process_group()


def _pickled(error: BaseException, who: str) -> bytes:
    text = "".join(traceback.format_exception(error))
    failure = RankFailure(time.monotonic(), error, any(words in str(error) for words in _LOST_PEER))
    note = f"raised on {who}:\n{text}"
    error.add_note(note)
    try:
        packed = pickle.dumps(failure)
        pickle.loads(packed)  # Exceptions with their own constructor often pickle and then fail to unpickle.
    except Exception:
        carried = RankError(f"{who} raised {type(error).__name__}: {error}")
        carried.add_note(note)
        packed = pickle.dumps(failure._replace(error=carried))
    return packed


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(path)


def _redirect_output(path: Path) -> None:
    """Redirects stdout and stderr to a file: the fork server's own may be a terminal or pipe that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # Between what C prints, in the order in which it was said.
