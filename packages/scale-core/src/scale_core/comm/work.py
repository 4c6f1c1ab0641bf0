"""Handles of asynchronous collectives, which own their buffers, and the error that names the rank waited for.

The transport reads and writes memory after the call that started it has returned, and torch's own handles keep nobody
from freeing or reading it too early. So every transfer has one handle that holds its buffers until it has been waited
for, and every failure is raised there, as one kind of error.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from scale_core import compat
from scale_core.comm.fork import ForkCount, forked_error
from scale_core.device.streams import has_streams
from scale_core.errors import TransferError

LIMIT_VARIABLE = "SCALE_LIMIT_SECONDS"
# The longest limit: torch's default of half an hour is too long to look at a machine that does nothing.
LIMIT_SECONDS = 600.0

# Shorter waits are never warned of, however short the limit.
_LONG_SECONDS = 5.0
# How long the others may take to end a transfer that this rank has canceled.
_GRACE_SECONDS = 5.0


def process_limit() -> float | None:
    """The limit of `SCALE_LIMIT_SECONDS` for every wait of this process that is given none; None where it is not set.

    Raises:
        ValueError: It is not a number of seconds above 0.
    """
    text = os.environ.get(LIMIT_VARIABLE)
    return None if text is None else _seconds_in(text)


@cache
def _seconds_in(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError(f"expected a number of seconds above 0 in {LIMIT_VARIABLE}, got {text!r}: such as 600")
    return seconds


def limit_of(process_group: dist.ProcessGroup | None, limit_seconds: float | None) -> float:
    """The longest wait in a group: `limit_seconds`, `SCALE_LIMIT_SECONDS`, or the group's own, at most ten minutes."""
    if limit_seconds is not None:
        if not limit_seconds > 0:
            raise ValueError(f"expected limit_seconds above 0, or None for the group's own, got {limit_seconds}")
        return limit_seconds
    if (limit := process_limit()) is not None:
        return limit
    if process_group is None or compat.is_fake_group(process_group):
        return LIMIT_SECONDS
    return min(compat.time_limit(process_group).total_seconds(), LIMIT_SECONDS)


_logger = logging.getLogger(__name__)


class WaitClock:
    """The seconds that this process has waited for other ranks on the host; `late_ranks` compares them."""

    seconds = 0.0


class Work(Protocol):
    """torch's handle of an asynchronous operation."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class CollectiveWork:
    """An asynchronous collective; it owns its buffers until `wait()` returns.

    A handle must be waited on or canceled: one that is dropped with neither warns, because its result could be read
    while the transfer still runs. If a transfer could not start, `wait()` raises its error.

    Examples:
        >>> import torch
        >>> from scale_core import Group
        >>> from scale_core.comm.collectives import all_reduce
        >>> work = all_reduce(torch.ones(3), Group())  # a group of this rank only
        >>> work.wait()
        tensor([1., 1., 1.])

    See also: [the core](../how-the-core-works.md).
    """

    def __init__(
        self,
        op: str,
        works: Sequence[tuple[int | None, Work]],
        result: Tensor,
        finish: Callable[[], Tensor | CollectiveWork] | None = None,
        keep: Sequence[Tensor] = (),
        rank: int | None = None,
    ) -> None:
        self.op = op
        self._rank = rank
        self._works = list(works)
        self._result: Tensor | None = result
        self._finish = finish
        self._keep = list(keep)
        self._open = True
        self._started_in = ForkCount.number

    def then(self, follow: Callable[[Tensor], Tensor | CollectiveWork]) -> CollectiveWork:
        """Returns this handle; its result becomes the result of `follow`, or of the collective that it returns."""
        result, finish = self._result, self._finish

        def finish_and_follow() -> Tensor | CollectiveWork:
            value = result if finish is None else finish()
            assert value is not None, "it is called once, where the result is"
            return value.then(follow) if isinstance(value, CollectiveWork) else follow(value)

        self._finish = finish_and_follow
        return self

    def wait(self, limit_seconds: float | None = None) -> Tensor:
        """Returns the result once it is complete, in its collective's shape (on CUDA: in the current stream's order).

        Args:
            limit_seconds: How long to wait for one message; None is `SCALE_LIMIT_SECONDS`, or the group's own limit, as
                it always is on CUDA.

        Raises:
            TransferError: A peer exited, is at a different event, or took longer than the limit.
            LaunchError: This process was forked after the collective began.
        """
        if self._open:
            self._open = False
            if self._started_in != ForkCount.number:
                raise forked_error()
            result, self._result = self._result, None  # An incomplete result is never returned.
            works, self._works = self._works, []
            if _is_on_device(result):
                limit_seconds = None  # NCCL would hold the host up to keep a limit; its own watchdog keeps the group's.
            elif limit_seconds is None and works:
                limit_seconds = process_limit()
            while works:
                try:
                    wait_for(self.op, *works.pop(0), limit_seconds, self._rank)
                except TransferError:
                    raise
                except BaseException:  # Ctrl-C, or a warning that is an error: the transport still writes.
                    for peer, work in works:
                        with suppress(TransferError, Warning):
                            wait_for(self.op, peer, work, limit_seconds, self._rank)
                    raise
            finish, self._finish = self._finish, None
            works, self._keep = [], []  # Sent tensors are free before `finish` takes memory of its own.
            final = result if finish is None else finish()
            self._result = final.wait(limit_seconds) if isinstance(final, CollectiveWork) else final
        if self._result is None:
            raise TransferError(self.op, None, "it was canceled, or has failed before")
        return self._result

    def cancel(self) -> None:
        """Drops the result after an error elsewhere, once the transfer has ended.

        It waits because the transport still writes into the buffers, and can't reuse a connection on which a message
        found no buffer. If all ranks have failed in the same way, they meet here, and it takes no time. If the others
        never come, the connection is cut after a few seconds, and the group can't be used any more. On CUDA the current
        stream waits, and no limit is set: NCCL would count it from when the collective was enqueued, perhaps long ago,
        and end the communicator of a job that goes on.
        """
        if not self._open:
            return
        self._open = False
        if self._started_in != ForkCount.number:
            return  # It is the parent's, which waits for it.
        deadline = None if _is_on_device(self._result) else time.monotonic() + _GRACE_SECONDS
        for peer, work in self._works:
            with suppress(TransferError):
                wait_for(self.op, peer, work, None if deadline is None else max(0.001, deadline - time.monotonic()))
        self._result, self._finish = None, None
        self._works, self._keep = [], []

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            try:
                warnings.warn(f"{self.op} was dropped without wait()", ResourceWarning, stacklevel=2)
            finally:
                self.cancel()


def _is_on_device(result: Tensor | None) -> bool:
    """Whether the transfer is ordered by streams, and not waited for on the host."""
    return result is not None and result.device.type != "cpu" and has_streams(result.device)


class _FailedWork:
    """An operation that could not start; it raises where it is waited for."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise self._error


def start_work(peer: int | None, start: Callable[[], Work]) -> tuple[int | None, Work]:
    """Starts an operation with a rank (None: with the group); one that can't start fails in `wait_for`."""
    try:
        return peer, start()
    except RuntimeError as error:  # The connection to a rank is gone.
        return peer, _FailedWork(error)


def wait_for(op: str, peer: int | None, work: Work, limit_seconds: float | None, rank: int | None = None) -> None:
    """Waits for one operation of `op` of `rank` with `peer` (None: the group); warns past half of the limit."""
    began = time.monotonic()
    try:
        if limit_seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=limit_seconds))
    except RuntimeError as error:
        raise TransferError(op, peer, _first_line(error), rank=rank) from error
    waited = time.monotonic() - began
    WaitClock.seconds += waited
    if limit_seconds is not None and waited > max(limit_seconds / 2, _LONG_SECONDS):
        whom = "the group" if peer is None else f"rank {peer}"
        message = (
            f"{op} waited {1000 * waited:.0f} ms for {whom}, more than half of limit_seconds={limit_seconds:g}, at "
            "which a wait is an error: find out what keeps that rank, or raise the limit"
        )
        _logger.warning(message)
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def _first_line(error: BaseException) -> str:
    """The first sentence of a torch error, without its place in torch's sources."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". ", 1)[0]
