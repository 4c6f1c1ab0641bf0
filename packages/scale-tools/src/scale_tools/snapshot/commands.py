"""The commands of `scale-train snapshot`.

Exit codes: 0 done, or all is well; 1 a snapshot is damaged, or two checkpoints differ; 2 wrong input, for example
a folder that is not a snapshot, is of a newer version, or can't be converted.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from scale_snapshot import DamagedSnapshotError, SnapshotError, verify_snapshot
from scale_snapshot.convert import convert_checkpoint, open_checkpoint
from scale_snapshot.convert.naming import Renaming, StoredState
from scale_snapshot.read_lock import ReadLock
from scale_snapshot.retention import remove_snapshot
from scale_tools.snapshot.comparison import differences
from scale_tools.snapshot.listing import (
    COMPLETE,
    DAMAGED,
    READ_NOW,
    UNFINISHED,
    SnapshotRow,
    as_table,
    current_time,
    recognize_own,
    snapshot_folder,
    snapshots_in,
)
from scale_tools.snapshot.options import (
    ConsolidateOptions,
    ConvertOptions,
    DiffOptions,
    LsOptions,
    PruneOptions,
    SnapshotOptions,
    VerifyOptions,
)
from scale_train.configuration.resolve import parse_bytes
from scale_train.errors import InputError, reason_of, reported
from scale_train.training.memory import format_bytes

FOUND = 1
"""The exit code of what was looked for: damage, or a difference."""


def snapshot(options: SnapshotOptions) -> int:
    """Runs one of the commands and returns its exit code; what can't be done is printed in one line."""
    return reported(lambda: _told(options.command))


def _told(command: object) -> int:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # What is passed over is told by the commands themselves.
            return _run(command)
    except DamagedSnapshotError as error:
        print(f"scale-train: {' '.join(str(error).split())}", file=sys.stderr)
        return FOUND
    except (ValueError, SnapshotError) as error:
        raise InputError(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise InputError(f"{where}{reason_of(error)}") from error


def _run(command: object) -> int:
    match command:
        case LsOptions():
            return ls(command)
        case VerifyOptions():
            return verify(command)
        case DiffOptions():
            return diff(command)
        case ConsolidateOptions():
            return consolidate(command)
        case ConvertOptions():
            return convert(command)
        case PruneOptions():
            return prune(command)
    raise AssertionError(command)


def ls(options: LsOptions) -> int:
    """Lists snapshots; code 0 whatever their state is."""
    rows = snapshots_in(options.path)
    if options.json:
        _print_json({"path": str(options.path), "snapshots": [_as_json(row) for row in rows]})
    elif rows:
        print("\n".join(as_table(rows, current_time())))
    else:
        print(f"no snapshots in {options.path}")
    return 0


def verify(options: VerifyOptions) -> int:
    """Reads every byte of all snapshots of a folder; code 1 if one is damaged, 2 if one can't be read here."""
    rows = [row for row in snapshots_in(options.path) if row.state != UNFINISHED]
    if not rows:
        raise InputError(f"{options.path}: there are no snapshots in it")
    verified = []
    with _byte_bar("verifying", not options.json) as (begin, advance):
        begin(sum(row.num_bytes for row in rows if row.state == COMPLETE))
        for row in rows:
            state, reason = row.state, row.reason
            if state == COMPLETE:
                try:
                    with ReadLock(row.path):
                        verify_snapshot(row.path, advance)
                except (DamagedSnapshotError, FileNotFoundError) as error:
                    if not row.path.exists():  # It was removed since the folder was listed.
                        continue
                    state, reason = DAMAGED, str(error)
            verified.append((row, state, reason))
    if options.json:
        verified_rows = [{**_as_json(row), "state": state, "reason": reason} for row, state, reason in verified]
        _print_json({"path": str(options.path), "snapshots": verified_rows})
    else:
        for row, state, reason in verified:
            print(
                f"{row.path}: "
                f"{'verified, ' + format_bytes(row.num_bytes) if state == COMPLETE else f'{state}: {reason}'}"
            )
    states = {state for _, state, _ in verified}
    return FOUND if DAMAGED in states else 2 if states != {COMPLETE} else 0


def diff(options: DiffOptions) -> int:
    """Compares two checkpoints; code 1 if they differ."""
    if not options.atol >= 0:
        raise InputError(f"--atol {options.atol}: a number of at least 0 is needed")
    a = _open(options.a, Renaming(_pairs(options.map), options.skip), options.trust)
    b = _open(options.b, Renaming((), options.skip), options.trust)
    changes = []
    with _byte_bar("comparing", not options.json) as (begin, advance):
        begin(sum(tensor.num_bytes for tensor in a.tensors.values()))
        for difference in differences(a, b, options.atol, advance):
            changes.append(difference)
            if not options.json:
                print(difference)
    compared = len(a.tensors.keys() & b.tensors.keys())
    if options.json:
        listed = [asdict(change) for change in changes]
        for entry in listed:
            entry["max_abs_diff"] = (
                str(entry["max_abs_diff"]) if entry["max_abs_diff"] == float("inf") else entry["max_abs_diff"]
            )
        _print_json({"a": str(options.a), "b": str(options.b), "num_compared": compared, "differences": listed})
    else:
        print(
            f"{len(changes)} of {len(a.tensors.keys() | b.tensors.keys())} keys differ"
            if changes
            else f"{compared} tensors, all equal"
        )
    return FOUND if changes else 0


def consolidate(options: ConsolidateOptions) -> int:
    """Writes the full weights of a snapshot's model as safetensors."""
    source = snapshot_folder(options.source)
    recognize_own(source)
    return _convert(
        source,
        options.destination,
        options.json,
        to="safetensors",
        names=Renaming(model=options.model),
        model_only=True,
        max_shard_bytes=parse_bytes("--max-file-size", options.max_file_size),
    )


def convert(options: ConvertOptions) -> int:
    """Converts a checkpoint."""
    if options.step is not None and options.step < 0:
        raise InputError(f"--step {options.step}: a number of at least 0 is needed")
    return _convert(
        snapshot_folder(options.source),
        options.destination,
        options.json,
        to=options.to,
        step=options.step,
        names=Renaming(_pairs(options.map), options.skip, options.model),
        model_only=options.model_only,
        max_shard_bytes=parse_bytes("--max-file-size", options.max_file_size),
        trust=options.trust,
    )


def prune(options: PruneOptions) -> int:
    """Removes the oldest complete snapshots until `keep` are left."""
    if options.keep < 1:
        raise InputError(f"--keep {options.keep}: at least 1 stays")
    if recognize_own(folder := snapshot_folder(options.path)) is not None and folder.name.startswith("step-"):
        raise InputError(f"{options.path}: this is one snapshot; give the folder that it is in")
    rows = snapshots_in(options.path)
    complete = [row for row in rows if row.state == COMPLETE]
    old, newest = complete[: -options.keep], complete[-options.keep :]
    left = [row for row in rows if row.state != COMPLETE]
    if not options.dry_run:
        read_now = [row for row in old if not remove_snapshot(row.path)]
        old = [row for row in old if row not in read_now]
        left += [replace(row, state=READ_NOW) for row in read_now]
    if options.json:
        _print_json(
            {
                "path": str(options.path),
                "removed": [_as_json(row) for row in old],
                "kept": [_as_json(row) for row in newest],
                "left_alone": [_as_json(row) for row in left],
                "dry_run": options.dry_run,
            }
        )
        return 0
    done = "would be removed" if options.dry_run else "removed"
    for row in old:
        print(f"{done}: {row.path.name} ({format_bytes(row.num_bytes)})")
    print(
        f"{done}: {len(old)} of {len(complete)} complete snapshots, {format_bytes(sum(row.num_bytes for row in old))}"
    )
    for row in left:
        print(f"left alone: {row.path.name}, {row.state}")
    return 0


def _convert(source: Path, destination: Path, as_json: bool, **how: Any) -> int:
    with _byte_bar("converting", not as_json) as (begin, advance):

        def progress(num_bytes: int, total: int) -> None:
            begin(total)
            advance(num_bytes)

        report = convert_checkpoint(source, destination, progress=progress, **how)
    if as_json:
        _print_json({**asdict(report), "path": str(report.path), "source": report.source.value})
        return 0
    print(f"{source}: {report.source.value}")
    print(f"wrote {report.path}: {report.num_tensors} tensors, {format_bytes(report.num_bytes)}, step {report.step}")
    for name, first in report.tied.items():
        print(f"{name} is {first} under another name, and is not listed again")
    return 0


def _open(path: Path, names: Renaming, trust: bool) -> StoredState:
    return open_checkpoint(snapshot_folder(path), names, trust=trust)


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """What --map says.

    >>> _pairs(["module.="])
    [('module.', '')]
    """
    for word in words:
        if "=" not in word:
            raise InputError(f"--map {word}: write OLD=NEW, such as module.= to take module. off")
    return [(word.partition("=")[0], word.partition("=")[2]) for word in words]


def _as_json(row: SnapshotRow) -> dict[str, Any]:
    return {**asdict(row), "path": str(row.path)}


def _print_json(found: Mapping[str, Any]) -> None:
    print(json.dumps(found, allow_nan=False))


@contextmanager
def _byte_bar(what: str, shown: bool) -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """A bar of bytes on standard error, where that is a terminal: functions that set the total, and that go on."""
    console = Console(stderr=True, highlight=False)
    if not (shown and console.is_terminal):
        yield lambda total: None, lambda num_bytes: None
        return
    bar = Progress(
        *(TextColumn(what), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()),
        console=console,
        transient=True,
    )
    task = bar.add_task("", total=None)
    with bar:
        yield (
            lambda total: bar.update(task, total=total),
            lambda num_bytes: bar.update(task, advance=num_bytes),
        )
