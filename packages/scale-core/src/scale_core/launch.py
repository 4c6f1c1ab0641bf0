"""Ranks that find each other, and end together."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when the one that started it ends; elsewhere does nothing.

    Args:
        parent: The process id that the parent had when it started us: if that is gone already, end now.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def name_of_exit(code: int) -> str:
    """Returns an exit code in words: "was killed by SIGKILL", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
