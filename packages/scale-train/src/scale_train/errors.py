"""Errors that end a training early, with their exit codes.

One exception per exit code, so that the command line maps them in one place and everything below raises its own:

    ScaleError
    +-- InputError          2    the request cannot be done; its text is one line with the change to make
    +-- Interrupted       128+n  signal n asked to stop (130: Ctrl-C, 143: SIGTERM), and the last step is saved
    +-- TrainingDiverged    1    the loss or the weights are no numbers any more
    +-- RanksLost           1    another rank ended, or cannot be reached
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable

from scale_core.errors import ScaleError


class InputError(ScaleError, ValueError):
    """Wrong input: one line for the user, and exit code 2."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class Interrupted(ScaleError):
    """A signal ended the training between two steps."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number  # 2 for Ctrl-C, 15 for a request to end

    @property
    def exit_code(self) -> int:
        """As shells count: 130 for Ctrl-C, 143 for a request to end."""
        return 128 + self.signal_number


class TrainingDiverged(ScaleError, ArithmeticError):
    """The loss or the weights became infinite or no numbers."""

    exit_code = 1


class RanksLost(ScaleError):
    """Another rank ended or cannot be reached."""

    exit_code = 1


def reported(command: Callable[[], int]) -> int:
    """Returns the exit code of a command; wrong input is printed in one line."""
    try:
        return command()
    except InputError as error:
        print(f"scale-train: {error}", file=sys.stderr)
        return error.exit_code


def reason_of(error: OSError) -> str:
    """Returns why a file could not be written; limits on files and on users count as a full disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "the disk is full"
    return error.strerror or str(error)
