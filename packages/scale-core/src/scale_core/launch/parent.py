"""Processes that end with the one that started them, also where that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when the one that started it ends; elsewhere does nothing.

    Args:
        parent: The process id of that one: where it has ended before the call, this process ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def is_orphan() -> bool:
    """Whether the process that started this one has ended: the parent is then process 1, which does not run Python."""
    if sys.platform != "linux" or os.getppid() != 1:
        return False
    try:
        return b"python" not in Path("/proc/1/cmdline").read_bytes()
    except OSError:
        return False
