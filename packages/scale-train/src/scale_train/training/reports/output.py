"""The standard output of a training, which goes on where nobody reads it any more, or its disk is full."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import TextIO


class Output:
    """A stream like `sys.stdout`; text that can't be written is left out, and said once on standard error."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._failed = False

    @property
    def encoding(self) -> str:
        return self._stream.encoding

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self._stream.isatty()

    def fileno(self) -> int:
        """The stream's file descriptor."""
        return self._stream.fileno()

    def write(self, text: str) -> int:
        """Writes text; characters that the encoding lacks as escapes."""
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        except (OSError, ValueError) as error:  # A ValueError where the stream itself is closed.
            self._tell(error)
        return len(text)

    def flush(self) -> None:
        """Hands on what was written."""
        try:
            self._stream.flush()
        except (OSError, ValueError) as error:
            self._tell(error)

    def end(self) -> None:
        """Gives up what could not be written, at which Python would fail when it ends."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._stream.fileno())

    def _tell(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            with suppress(OSError, ValueError, AttributeError):  # Standard error may be the same pipe.
                text = f"cannot write to standard output ({error}); training goes on, and metrics.jsonl has its numbers"
                print(f"scale-train: {text}", file=sys.stderr, flush=True)
