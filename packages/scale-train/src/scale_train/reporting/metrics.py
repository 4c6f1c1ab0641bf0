"""The curve on disk: `metrics.jsonl`, one JSON object per line, for the plot and for a resumed run.

It is worth keeping, and not worth a training: a disk that is full when a run begins is wrong input, and one that fills
up later costs lines of this file and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scale_train.errors import reason_of

# More than the first lines need: a disk on which a file can be made may still have no room for its first byte.
_ROOM_BYTES = 4096


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The entries of a metrics file, oldest first; none where there is no file.

    A line that is cut off (the run was killed while writing it) is left out.
    """
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def begin_metrics(path: Path, first_step: int) -> None:
    """Makes the file of a run that begins after `first_step` steps: entries beyond them are cut off, to be done again.

    Whole or not at all: until the last moment the file that was there stays.

    Raises:
        OSError: It cannot be written; the disk is full, for example.
    """
    kept = [entry for entry in read_metrics(path) if entry["step"] <= first_step]
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_text(" " * _ROOM_BYTES)
        partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept))
        os.replace(partial, path)
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise


class MetricsFile:
    """Appends entries, each step's of a kind once; says once if it cannot, and tries again at the next.

    Args:
        path: A file that `begin_metrics` made.
        note: Called with one line for people.
    """

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note = note
        self._failed = self._torn = False
        self._there = {_identity(entry) for entry in read_metrics(path)}

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes one entry, unless a run before this one did."""
        if _identity(entry) in self._there:
            return
        try:
            with self._path.open("a") as file:
                # A line that was cut off must not take the next one with it.
                file.write(("\n" if self._torn else "") + json.dumps(entry) + "\n")
        except OSError as error:
            self._torn = True
            if not self._failed:
                self._failed = True
                self._note(f"cannot write {self._path}: {reason_of(error)}; training goes on")
        else:
            self._torn = False
            self._there.add(_identity(entry))


def _identity(entry: Mapping[str, Any]) -> tuple[int, bool]:
    """The step, and whether it is a judgement of the held-out text."""
    return entry["step"], "held_out_bits_per_byte" in entry
