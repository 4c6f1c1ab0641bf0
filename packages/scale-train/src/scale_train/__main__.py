"""`python -m scale_train ...` is `scale-train ...`.

Both begin here: what they need takes a while to load, and Ctrl-C meanwhile should show no traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress

from scale_train.interrupts import leave_on_ctrl_c


def run() -> int:
    """Runs the command and returns its exit code."""
    open_standard_streams()
    try:
        with leave_on_ctrl_c():
            from scale_train.cli import main
        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def open_standard_streams() -> None:
    """Has those that were closed by whoever started this lead nowhere: else other files would get their numbers."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_RDWR)
                setattr(sys, name, os.fdopen(nowhere, "r" if number == 0 else "w"))


if __name__ == "__main__":
    sys.exit(run())
