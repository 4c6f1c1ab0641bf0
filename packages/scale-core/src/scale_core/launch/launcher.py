"""Starts ranks on this machine from the program itself: `program --ranks 2` without a launcher around it.

The ranks start and end together: one that fails ends the others, a signal to the program reaches all of them once, and
they end when the program is killed.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from scale_core.arguments import checked_arguments
from scale_core.comm.work import LIMIT_SECONDS, process_limit
from scale_core.errors import LaunchError
from scale_core.launch.parent import die_with_parent
from scale_core.launch.rendezvous import DEVICE_VARIABLE, open_store
from scale_core.launch.roll_call import JOB_VARIABLE

UNGUARDED = 227
"""The exit code of a process that was to start ranks while it was only being started itself."""


@checked_arguments
def launch_local(
    fn: Callable[..., object], num_ranks: int, *args: Any, device: str = "cpu", grace: float = 10.0
) -> int:
    """Calls `fn(*args)` in `num_ranks` new processes and returns an exit code when all have ended.

    `fn` calls `init_distributed` itself. Its `SystemExit` is its exit code; any other exception is printed and is code
    1. SIGINT and SIGTERM are passed on to the ranks, whose main thread may catch them; ranks still running `grace`
    seconds later are killed. Call it under `if __name__ == "__main__"`, as multiprocessing.

    Args:
        fn: A function at the top level of a module. The main script is possible, but not a notebook or `python -c`.
        num_ranks: The number of processes, at least 1.
        *args: Given to `fn` on every rank; they must be picklable.
        device: "cpu" or "cuda". Ranks on the CPU share its cores and keep freed memory for reuse.
        grace: Seconds between asking a rank to end and killing it.

    If ranks still run `SCALE_LIMIT_SECONDS` (default: ten minutes) after others have ended, they are named once. They
    may still work, or be blocked.

    Returns:
        0; or the code of the rank that failed first, 128 + n if it was killed by signal n.

    Raises:
        ValueError: `num_ranks` is below 1, or there are fewer CUDA devices, or `fn` is in no file or not at the top
            level of one.
        LaunchError: The main script calls this outside of `if __name__ == "__main__"`.

    Examples:
        >>> import torch.distributed as dist
        >>> from scale_core.launch import init_distributed, launch_local
        >>> def main():
        ...     group = init_distributed()
        ...     print(f"rank {group.rank} of {group.size}")
        >>> if __name__ == "__main__":
        ...     code = launch_local(main, 2)  # doctest: +SKIP

    See also: [the guide to starting ranks](../guides/scale-further.md#start-the-ranks-torchrun-slurm-elastic).
    """
    check_may_start("launch_local", fn)
    if num_ranks < 1:
        raise ValueError(f"expected num_ranks of at least 1, got {num_ranks}")
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        raise ValueError(
            f"expected at most {torch.cuda.device_count()} ranks, one for each CUDA device, got {num_ranks}"
        )
    store = open_store("127.0.0.1", 0, serve=True, timeout=300.0)
    ranks: list[BaseProcess] = []
    received: list[int] = []
    context = multiprocessing.get_context("spawn")
    try:
        with _forward_signals(ranks, received):
            for rank in range(num_ranks):
                variables = _variables(rank, num_ranks, store.port, device)
                with _environment(variables), _block_sigint(), main_hidden(unless=True):
                    process = context.Process(target=_run_rank, args=(os.getpid(), fn, args), name=f"rank {rank}")
                    process.start()
                    ranks.append(process)
            return _supervise(ranks, received, grace)
    finally:
        kill_all(ranks)


def format_exit_code(code: int) -> str:
    """Describes an exit code: "was killed by SIGKILL", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _variables(rank: int, num_ranks: int, port: int, device: str) -> dict[str, str]:
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # The store is the program's: it outlives every rank.
        "TORCHELASTIC_RESTART_COUNT": "0",
        JOB_VARIABLE: f"process {os.getpid()}, port {port}",
        DEVICE_VARIABLE: device,
    }
    if device == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        defaults = {
            "OMP_NUM_THREADS": str(max(1, cores // num_ranks)),
            # Buffers that are freed and filled again would cost a page fault per page, five times the copy itself.
            "MALLOC_MMAP_MAX_": "0",
            "MALLOC_TRIM_THRESHOLD_": "2147483647",
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        }
        variables.update({name: value for name, value in defaults.items() if name not in os.environ})
    return variables


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets environment variables for a process that starts now: its C library reads them before any Python runs."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Blocks SIGINT while a process starts, so that a Ctrl-C waits until `_live` can handle it."""
    # Held back and not ignored: one that came while the process was loading still ends it.
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing starts it with the first process, and lets signals in then
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _forward_signals(ranks: Sequence[BaseProcess], received: list[int]) -> Iterator[None]:
    """Passes SIGINT and SIGTERM on to the ranks, and records them."""

    def pass_on(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        _signal(ranks, number)

    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals.
        return
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _supervise(ranks: Sequence[BaseProcess], received: Sequence[int], grace: float) -> int:
    code, deadline, num_signals = 0, None, 0
    running = list(ranks)
    since, limit = 0.0, process_limit() or LIMIT_SECONDS
    while running:
        wait_for_any([process.sentinel for process in running], timeout=0.2)
        # Asked once: a rank that ends right after this line is seen in the next turn, with its code.
        running = [process for process in running if process.exitcode is None]
        ended = [(rank, process.exitcode) for rank, process in enumerate(ranks) if process not in running]
        failed = [(rank, exitcode) for rank, exitcode in ended if exitcode]
        if failed and code == 0 and not received:
            (rank, first), *_ = failed
            if first == UNGUARDED:
                raise LaunchError(lacks_main_guard("launch_local"))
            code = first if first > 0 else 128 - first
            print(f"rank {rank} {format_exit_code(first)}; the others are ended", file=sys.stderr)
            _signal(ranks, signal.SIGTERM)
            deadline = time.monotonic() + grace
        if len(received) > num_signals:
            num_signals, deadline = len(received), time.monotonic() + grace
        if ended and running and deadline is None:
            since = since or time.monotonic()
            if time.monotonic() - since > limit:
                late = ", ".join(str(rank) for rank, process in enumerate(ranks) if process in running)
                print(
                    f"rank {late} still runs {limit:g} s after others have ended. If it is blocked, as in "
                    "destroy_process_group() or a destructor, end the program by Ctrl-C",
                    file=sys.stderr,
                )
                limit = math.inf  # Once.
        if deadline is not None and time.monotonic() > deadline:
            kill_all(ranks)
    if received and any(process.exitcode for process in ranks):
        return 128 + received[-1]
    return code


def _signal(ranks: Sequence[BaseProcess], number: int) -> None:
    for process in ranks:
        if process.exitcode is None and process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(process.pid, number)


def kill_all(ranks: Sequence[BaseProcess]) -> None:
    """Kills the ranks that still run, and waits for all of them."""
    for process in ranks:
        if process.exitcode is None:
            process.kill()
    for process in ranks:
        process.join()


_DESTROY_SECONDS = 60.0


def _run_rank(parent: int, fn: Callable[..., object], args: tuple[Any, ...]) -> NoReturn:
    """The main function of a rank's process."""
    die_with_parent(parent)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)  # A terminal's Ctrl-C then reaches the program alone, which passes it on once.
    code = 1
    try:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        fn(*args)
        code = 0
        _destroy_process_group()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except BaseException:
        traceback.print_exc()
    logging.shutdown()
    with suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # Past every finalizer: a thread of the transport may not end, or abort the process.


def _destroy_process_group() -> None:
    """Destroys the group, unless that takes longer than any wait may: the work of the rank is done."""
    if not dist.is_initialized():
        return
    limit = process_limit() or _DESTROY_SECONDS
    rank = dist.get_rank()
    errors: list[Exception] = []

    def destroy() -> None:
        try:
            dist.destroy_process_group()
        except Exception as error:
            errors.append(error)

    destroying = threading.Thread(target=destroy, name="destroys the process group", daemon=True)
    destroying.start()
    destroying.join(limit)
    if destroying.is_alive():
        print(f"rank {rank}: destroy_process_group() still blocks after {limit:g} s; the rank ends", file=sys.stderr)
    for error in errors:
        raise error


# New processes run the main script again to find their functions. A script that starts ranks outside of
# `if __name__ == "__main__"` would start them again in each rank; and functions that were typed in can't be found. Both
# errors give the line to write.


def lacks_main_guard(call: str) -> str:
    """The error text for a script that starts ranks whenever it is imported."""
    return (
        f"{call} was called again by a rank that only imported the main script: each rank runs that script from the "
        f'top to find its functions. Write `if __name__ == "__main__":` above the line that calls {call}, and indent '
        "it, with everything that only the program itself is to do"
    )


def check_may_start(call: str, fn: Callable[..., object]) -> None:
    """Checks that ranks may be started here and can find `fn`; ends a process that only imports the script."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # So multiprocessing asks itself.
        print(lacks_main_guard(call), file=sys.stderr, flush=True)
        os._exit(UNGUARDED)  # Whoever imports the script may take any exception for one of its own, and go on.
    while isinstance(fn, functools.partial):
        fn = fn.func
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    if inspect.ismethod(fn):  # Found by the class of its object, wherever the class that defines it stands.
        owner = fn.__self__ if isinstance(fn.__self__, type) else type(fn.__self__)
        name = f"{owner.__qualname__}.{fn.__name__}"
    if "<lambda>" in name or "<locals>" in name:
        raise ValueError(
            f"{call}: new processes cannot find {name}: it is a lambda or is defined inside of a function. Write it as "
            "a function at the top level of a module"
        )
    if getattr(fn, "__module__", None) == "__main__" and not _has_file(sys.modules["__main__"]):
        raise ValueError(
            f"{call}: new processes cannot find {name}, which is in no file: it was typed in, or given to `python -c`, "
            f"standard input or a notebook. Write it to a file beside this, work.py, and `from work import {name}`"
        )


@contextmanager
def main_hidden(unless: bool) -> Iterator[None]:
    """A context in which new processes don't run the main script (often pytest itself)."""
    main = sys.modules["__main__"]
    if not unless or not _has_file(main):
        sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _has_file(main: Any) -> bool:
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or (file is not None and Path(file).exists())
