"""Ctrl-C and SIGTERM: all ranks stop after the same step, and save it.

A signal reaches ranks at different moments. Each records it; the ranks compare and stop together, so that none waits in
a collective for one that has ended.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group

# A terminal signals every process in it, and a launcher passes its signal on: one key press may arrive twice.
_ECHO_SECONDS = 1.0


class StopSignal:
    """Inside, Ctrl-C and SIGTERM are recorded; a second one, a second or more later, interrupts at once."""

    def __init__(self) -> None:
        self.received = 0
        self._when = 0.0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Python lets only the main thread handle signals; elsewhere (a notebook's worker) nothing is caught.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._record)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _record(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.received and now - self._when > _ECHO_SECONDS:
            raise KeyboardInterrupt
        if not self.received:
            self.received, self._when = number, now

    def received_by_any_rank(self, group: Group) -> int:
        """The signal that any rank received, or 0; the same answer on all ranks, which all have to call this."""
        return max(row[0] for row in exchange([self.received], group))
