"""`python -m scale_train ...` is `scale-train ...`.

Both begin here: torch takes a while to load, and Ctrl-C meanwhile should show no traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType


def run() -> int:
    """Runs the command and returns its exit code."""
    try:
        return _load()()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _load() -> Callable[[], int]:
    # Nothing needs an orderly end yet, and an exception inside of an import may be turned into another one.
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from scale_train.cli import main
    finally:
        signal.signal(signal.SIGINT, before)
    return main


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)


if __name__ == "__main__":
    sys.exit(run())
