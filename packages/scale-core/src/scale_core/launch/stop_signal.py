"""A signal to stop that all ranks obey after the same step, so that the last step is saved and nothing is lost."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from scale_core.comm.collectives import exchange
from scale_core.comm.group import GroupLike, group_of

# A terminal signals every process in it, and a launcher passes its signal on: one key press may arrive twice.
_ECHO_SECONDS = 1.0


class StopSignal:
    """Inside, Ctrl-C (SIGINT) and a request to end (SIGTERM, as schedulers send before they take a machine) are noted.

    A second Ctrl-C, a second or more later, interrupts at once; any number of SIGTERMs are one. In other threads than
    the main thread it catches nothing, because Python handles signals only in the main thread.

        >>> from scale_core.launch import StopSignal
        >>> with StopSignal() as stop:
        ...     for step in range(3):
        ...         # forward, backward, optimizer.step()
        ...         if stop.on_any_rank():
        ...             # save_snapshot("runs/1", step, state)
        ...             raise SystemExit(stop.exit_code)  # 143 after SIGTERM, 130 after Ctrl-C

    Args:
        keep_after: The class of errors after which signals stay caught. Use it for errors that end the program, for
            example ScaleDistributedError: If the launcher ends this rank because a different rank has failed, the
            signal then does not cut off the message.

    Attributes:
        received: The number of the signal that this rank received; 0 if none.

    See also: [the guide to starting ranks](../guides/scale-further.md#start-the-ranks-torchrun-slurm-elastic).
    """

    def __init__(self, *, keep_after: type[BaseException] | None = None) -> None:
        self.keep_after = keep_after
        self.received = 0
        self._agreed = 0
        self._when = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.keep_after is not None and isinstance(error, self.keep_after):
            return
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def on_any_rank(self, process_group: GroupLike = None, limit_seconds: float | None = None) -> int:
        """The number of the signal that any rank received, or 0; all ranks call it together and get the same.

        It costs one small message, and on CUDA none that waits for the device where the group reaches the host.

        Args:
            process_group: The ranks; the default group if None.
            limit_seconds: The longest wait for a rank; None is the group's own limit.

        Raises:
            TransferError: A rank did not come.
        """
        rows = exchange([self.received], group_of(process_group), limit_seconds=limit_seconds)
        self._agreed = max(row[0] for row in rows)
        return self._agreed

    @property
    def exit_code(self) -> int:
        """As shells count: 128 + the number of the signal; 0 where no rank received one."""
        number = self._agreed or self.received
        return 128 + number if number else 0

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and number == signal.SIGINT and now - self._when > _ECHO_SECONDS:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self._when = number, now
