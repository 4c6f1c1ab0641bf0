"""`metrics.jsonl`: one JSON object per line, for the plot and for a resumed run.

A disk that is full when a run begins is an error; one that fills up later costs lines of this file and nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from scale_train.errors import reason_of

# More than the first lines need: a full disk may still allow an empty file.
_ROOM_BYTES = 4096


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the entries, oldest first; without a last line that a killed run left incomplete."""
    entries = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entries.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return entries


def begin_metrics(path: Path, first_step: int) -> None:
    """Writes the file of a run that begins after `first_step` steps, without later entries; atomically."""
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
    """Appends entries, each once; calls `note` once if it cannot, and tries again at the next."""

    def __init__(self, path: Path, note: Callable[[str], None]) -> None:
        self._path = path
        self._note = note
        self._failed = self._incomplete = False
        self._written = {_entry_key(entry) for entry in read_metrics(path)}

    def append(self, entry: Mapping[str, Any]) -> None:
        """Writes one entry, unless a run before this one did."""
        if _entry_key(entry) in self._written:
            return
        try:
            with self._path.open("a") as file:
                # An incomplete line must not spoil the next one.
                file.write(("\n" if self._incomplete else "") + json.dumps(entry) + "\n")
        except OSError as error:
            self._incomplete = True
            if not self._failed:
                self._failed = True
                self._note(f"cannot write {self._path}: {reason_of(error)}; training goes on")
        else:
            self._incomplete = False
            self._written.add(_entry_key(entry))


def _entry_key(entry: Mapping[str, Any]) -> tuple[int, bool]:
    """The step, and whether it is an evaluation."""
    return entry["step"], "held_out_bits_per_byte" in entry
