"""Standard input, output and error of a program that was started without some of them."""

from __future__ import annotations

import os
import sys
from contextlib import suppress


def open_standard_streams() -> None:
    """Has those that are closed lead nowhere: else other files would get their numbers, and nothing can be printed."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_RDWR)
                os.set_inheritable(nowhere, True)  # The ranks that are started have the same ones.
                setattr(sys, name, os.fdopen(nowhere, "r" if number == 0 else "w"))
