"""`python -m scale_train ...` is `scale-train ...`.

Both begin here: their modules take a while to load, and Ctrl-C meanwhile should show no traceback.
"""

from __future__ import annotations

import signal
import sys

from scale_train.launch.interrupts import leave_on_ctrl_c
from scale_train.launch.standard_streams import open_standard_streams


def run() -> int:
    """Runs the command and returns its exit code."""
    open_standard_streams()
    try:
        with leave_on_ctrl_c():
            from scale_train.cli import main
        return main()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(run())
