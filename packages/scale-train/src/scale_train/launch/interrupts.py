"""Ctrl-C while a program is loading."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def leave_on_ctrl_c() -> Iterator[None]:
    """A context in which Ctrl-C ends the process at once: an exception inside of an import may become another one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets only the main thread handle signals.
        return
    before = signal.signal(signal.SIGINT, _leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
