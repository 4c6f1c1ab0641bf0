"""A transfer under way: the handle that owns its buffers, and the error that names whom it waited for.

The transport reads and writes memory after the call that began has returned, and torch's own handles keep nobody from
freeing or reading it too early. So every transfer of the house is one handle that holds its buffers until it has
been waited for, and however it fails, it fails there and as one kind of error.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from torch import Tensor

# A wait that is shorter than this is nobody's business, however short the limit.
_LONG_SECONDS = 5.0
# All errors of a transport are of one type, so that only their words tell them apart.
_CLOSED_BY_PEER = re.compile("(closed|reset) by peer")
# How long the others may take to end a transfer that this rank has given up.
_GRACE_SECONDS = 5.0


class Work(Protocol):
    """What torch returns for an operation under way."""

    def wait(self, timeout: timedelta = ...) -> bool: ...


class TransferError(RuntimeError):
    """A collective did not come to its end.

    Attributes:
        op: The collective, such as "all_gather".
        peer: The rank of the group that was waited for, or None where the transport does not say.
        gone: The same, where that rank has closed the connection, as it does by ending; otherwise None.
    """

    def __init__(self, op: str, peer: int | None, cause: str) -> None:
        whom = "the group" if peer is None else f"rank {peer}"
        super().__init__(f"{op} with {whom} failed: {cause}")
        self.op = op
        self.peer = peer
        self.gone = peer if _CLOSED_BY_PEER.search(cause) else None
        self._cause = cause

    def __reduce__(self) -> tuple[type[TransferError], tuple[str, int | None, str]]:
        return type(self), (self.op, self.peer, self._cause)


class Pending:
    """A collective under way; it owns its buffers until `wait()` returns.

    A handle must be waited on, or given up by `abandon()`: one that is dropped with neither warns, because its
    result could be read while the transfer still runs. A transfer that could not even begin says so in
    `wait()`, as one does that fails under way.
    """

    def __init__(
        self,
        op: str,
        works: Sequence[tuple[int | None, Work]],
        result: Tensor,
        finish: Callable[[], Tensor] | None = None,
        keep: Sequence[Tensor] = (),
    ) -> None:
        self.op = op
        self._works = list(works)
        self._result: Tensor | None = result
        self._finish = finish
        self._keep = list(keep)
        self._open = True

    def wait(self, limit_seconds: float | None = None) -> Tensor:
        """Returns the result once it is whole (on CUDA: in the order of the current stream).

        Args:
            limit_seconds: How long to wait for one message; None is the group's own limit, as it always is on CUDA.

        Raises:
            TransferError: A peer left, stood elsewhere, or took longer than the limit.
        """
        if self._open:
            self._open = False
            result, self._result = self._result, None  # Nobody gets a result that did not become whole.
            works, self._works = self._works, []
            if result is not None and result.is_cuda:
                limit_seconds = None  # NCCL would hold the host up to keep a limit; its own watchdog keeps the group's.
            _wait_for_all(self.op, works, limit_seconds)
            finish, self._finish = self._finish, None
            works, self._keep = [], []  # What was sent is free before `finish` takes memory of its own.
            self._result = result if finish is None else finish()
        if self._result is None:
            raise TransferError(self.op, None, "it was given up, or has failed before")
        return self._result

    def abandon(self) -> None:
        """Gives the transfer up after an error elsewhere; nobody will read its result.

        Waits for its end all the same, because the transport still writes into the buffers, and can't use a connection
        again on which a message found no buffer. Ranks that have failed alike are here together, so that takes no
        time; where the others never come, the connection is cut after a few seconds and the group is of no more use.
        """
        if not self._open:
            return
        self._open = False
        deadline = time.monotonic() + _GRACE_SECONDS
        for peer, work in self._works:
            with suppress(TransferError):
                _wait_for(self.op, peer, work, max(0.001, deadline - time.monotonic()))
        self._result, self._finish = None, None
        self._works, self._keep = [], []

    def __del__(self) -> None:
        if getattr(self, "_open", False):
            try:
                warnings.warn(f"{self.op} was dropped without wait()", ResourceWarning, stacklevel=2)
            finally:
                self.abandon()


class _Failed:
    """An operation that could not begin; it fails when it is waited for, where the others of its kind fail too."""

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        raise self._error


def begin(peer: int | None, start: Callable[[], Work]) -> tuple[int | None, Work]:
    """Starts an operation with a rank (None: with the group); one that can't begin fails where it is waited for."""
    try:
        return peer, start()
    except RuntimeError as error:  # The connection to a rank is gone.
        return peer, _Failed(error)


def wait_for(op: str, peer: int | None, work: Work, limit_seconds: float | None) -> None:
    """Waits for one operation.

    Args:
        op: The collective that it is a part of.
        peer: The rank that it is with; None is the group.
        work: The operation.
        limit_seconds: As in `Pending.wait`.

    Warns where that took more than half of the limit: a rank that is slower still will be an error.

    Raises:
        TransferError: It failed, or took longer than the limit.
    """
    began = time.monotonic()
    _wait_for(op, peer, work, limit_seconds)
    waited = time.monotonic() - began
    if limit_seconds is not None and waited > max(limit_seconds / 2, _LONG_SECONDS):
        whom = "the group" if peer is None else f"rank {peer}"
        warnings.warn(
            f"{op} waited {1000 * waited:.0f} ms for {whom}, more than half of limit_seconds={limit_seconds:g}, at "
            "which a wait is an error: find out what keeps that rank, or raise the limit",
            RuntimeWarning,
            stacklevel=3,
        )


def _wait_for_all(op: str, works: list[tuple[int | None, Work]], limit_seconds: float | None) -> None:
    while works:
        peer, work = works.pop(0)
        try:
            wait_for(op, peer, work, limit_seconds)
        except TransferError:
            raise
        except BaseException:  # Ctrl-C, or a warning that is an error: the transport still writes into the buffers.
            for other, left in works:
                with suppress(TransferError):
                    _wait_for(op, other, left, limit_seconds)
            raise


def _wait_for(op: str, peer: int | None, work: Work, limit_seconds: float | None) -> None:
    try:
        if limit_seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=limit_seconds))
    except RuntimeError as error:
        raise TransferError(op, peer, _first_line(error)) from error


def _first_line(error: BaseException) -> str:
    """The first sentence of a torch error, without the place in its sources that it begins with."""
    line = str(error).splitlines()[0] if str(error) else type(error).__name__
    return line.split("] ", 1)[-1].split(". ", 1)[0]
