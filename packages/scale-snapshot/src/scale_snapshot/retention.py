"""How many snapshots stay: the oldest are removed when a new one is complete.

Only complete snapshots older than the new one are removed, and only as many as leave `keep` complete ones. One that is
read at the moment stays until the next save, and whatever else is in the directory stays.
"""

from __future__ import annotations

import re
import shutil
import uuid
import warnings
from pathlib import Path

from scale_snapshot.format.metadata import read_manifest
from scale_snapshot.read_lock import rename_unread
from scale_snapshot.snapshot import at_stage

_SNAPSHOT = re.compile(r"step-(\d{8,})")
_REMOVED = re.compile(r"step-\d{8,}\.removed-[0-9a-f]{32}")


def remove_old(saved: Path, keep: int) -> list[Path]:
    """Removes complete snapshots older than `saved` beyond the newest `keep`, it included; returns their content.

    Where that fails, a warning says so: the new snapshot is complete.
    """
    removed: list[Path] = []
    try:
        for path in saved.parent.iterdir():  # Left by a killed process.
            if _REMOVED.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
        removed += [path for path in _older(saved)[keep - 1 :] if remove_snapshot(path)]
    except OSError as error:
        warnings.warn(f"{saved} is saved, but older snapshots could not be removed: {error}", stacklevel=2)
    return removed


def remove_snapshot(path: Path) -> bool:
    """Removes one snapshot, unless somebody reads it; whether it did.

    It has another name before its first file goes, so that no half of one is ever there.
    """
    aside = path.with_name(f"{path.name}.removed-{uuid.uuid4().hex}")
    if not rename_unread(path, aside):
        return False
    at_stage("removed", aside)
    shutil.rmtree(aside)
    return True


def _older(saved: Path) -> list[Path]:
    """The complete snapshots before this one, the newest first."""
    step = int(saved.name.removeprefix("step-"))
    steps = {path: int(match[1]) for path in saved.parent.iterdir() if (match := _SNAPSHOT.fullmatch(path.name))}
    before = sorted((path for path, its in steps.items() if its < step), key=steps.__getitem__, reverse=True)
    return [path for path in before if _is_complete(path)]


def _is_complete(path: Path) -> bool:
    try:
        read_manifest(path, retry_seconds=0)  # In the middle of a training nobody waits for an old one.
    except (OSError, ValueError, RuntimeError):  # Damaged, unfinished, written by a newer program, or not to be read.
        return False
    return True
