"""Which snapshots are in a folder, and the state of each: complete, damaged, newer, or unfinished."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scale_snapshot import DamagedSnapshotError, NewerSnapshotError, SnapshotError
from scale_snapshot.convert.snapshots import describe_snapshot
from scale_snapshot.foreign import Format, recognize
from scale_train.errors import InputError
from scale_train.training.memory import format_bytes

COMPLETE, DAMAGED, NEWER, UNFINISHED, OTHER = "complete", "damaged", "newer", "unfinished", "not readable"
READ_NOW = "being read"  # The state of one that is therefore not removed
_NAME = re.compile(r"step-(\d{8,})(\.tmp-.+|\.damaged-.+|\.removed-.+)?")
_CHECKPOINTS = "checkpoints"  # in a run's folder


@dataclass(frozen=True)
class SnapshotRow:
    """One snapshot of a folder.

    Attributes:
        path: Its directory.
        step: The training step, by its name.
        state: "complete" (its manifest and the lengths of its files are right), "damaged", "newer", "unfinished" or
            "not readable".
        num_bytes: The size of its files.
        num_ranks: How many ranks wrote it; 0 where that can't be read.
        num_tensors: How many tensors it has; 0 where that can't be read.
        saved: When it was saved, in seconds since 1970.
        reason: Why it is not complete.
    """

    path: Path
    step: int
    state: str
    num_bytes: int
    num_ranks: int
    num_tensors: int
    saved: float
    reason: str = ""


def snapshots_in(path: Path) -> list[SnapshotRow]:
    """The snapshots of a run, a folder, or that one, by step; what is unfinished or was set aside comes with them.

    Raises:
        InputError: The folder has no snapshots; of a foreign checkpoint it says what it is and how it is converted.
    """
    folder = snapshot_folder(path)
    if recognize_own(folder) is Format.SNAPSHOT:
        return [_row(folder)]
    entries = [entry for entry in folder.iterdir() if _NAME.fullmatch(entry.name) and entry.is_dir()]
    rows = []
    for entry in sorted(entries, key=lambda entry: (_step_of(entry), entry.name)):
        try:
            row = _row(entry)
        except FileNotFoundError:  # It was removed, or a save came to its end, since the folder was listed.
            continue
        if entry.exists():
            rows.append(row)
    return rows


def snapshot_folder(path: Path) -> Path:
    """The folder of the snapshots of a run, or the path itself."""
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    return path / _CHECKPOINTS if (path / _CHECKPOINTS).is_dir() else path


def recognize_own(path: Path) -> Format | None:
    """Whether this is a snapshot or a folder of snapshots; an InputError for anything else but a folder."""
    if _NAME.fullmatch(path.name) and path.is_dir():  # Also one that lacks its manifest.
        return Format.SNAPSHOT
    snapshot_format = recognize(path)
    if snapshot_format is not None and snapshot_format.is_foreign:
        raise InputError(snapshot_format.advice())
    if not path.is_dir():
        raise InputError(f"{path}: neither a run, nor a folder of snapshots, nor a snapshot")
    return None if snapshot_format is None else snapshot_format.format


def _row(path: Path) -> SnapshotRow:
    num_bytes = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    saved = path.stat().st_mtime
    match = _NAME.fullmatch(path.name)
    if match is not None and match[2]:
        is_damaged = match[2].startswith(".damaged")
        reason = "it was set aside" if is_damaged else "a save or a removal did not come to its end, or is under way"
        return SnapshotRow(path, _step_of(path), DAMAGED if is_damaged else UNFINISHED, num_bytes, 0, 0, saved, reason)
    try:
        about = describe_snapshot(path)
    except SnapshotError as error:
        state = {DamagedSnapshotError: DAMAGED, NewerSnapshotError: NEWER}.get(type(error), OTHER)
        return SnapshotRow(path, _step_of(path), state, num_bytes, 0, 0, saved, str(error))
    return SnapshotRow(path, about.step, COMPLETE, num_bytes, about.num_ranks, about.num_tensors, saved)


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match is not None else 0


def as_table(rows: Sequence[SnapshotRow], now: float) -> list[str]:
    """The rows as lines of text.

    >>> row = SnapshotRow(Path("runs/step-00000012"), 12, COMPLETE, 3_400_000, 2, 18, 1000.0)
    >>> for line in as_table([row], now=1090.0):
    ...     print(line)
        step       size  ranks  tensors            age  state
          12     3.4 MB      2       18      1 minutes  complete
    """
    lines = [f"{'step':>8} {'size':>10}  {'ranks':>5}  {'tensors':>7}  {'age':>13}  state"]
    for row in rows:
        ranks, tensors = (str(row.num_ranks), str(row.num_tensors)) if row.num_ranks else ("", "")
        reason = f": {row.path.name}, {row.reason}" if row.reason else ""
        lines.append(
            f"{row.step:>8} {format_bytes(row.num_bytes):>10}  {ranks:>5}  {tensors:>7}  "
            f"{format_age(now - row.saved):>13}  {row.state}{reason}"
        )
    return lines


def format_age(seconds: float) -> str:
    """A time in the largest unit of which it has one.

    >>> format_age(7300)
    '2 hours'
    """
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{int(seconds // length)} {unit}"
    return f"{max(0, int(seconds))} seconds"


def current_time() -> float:
    """Seconds since 1970."""
    return time.time()
