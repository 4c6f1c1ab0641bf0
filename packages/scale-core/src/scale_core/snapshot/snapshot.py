"""Checkpoints on disk that are complete or not there.

A job is killed at any moment, a disk fills up, one rank fails alone. So all ranks write a snapshot in a temporary
directory that no reader looks at; when every byte is on the disk, rank 0 writes the manifest and renames the directory.
A saved snapshot is never changed. Nothing is pickled: tensors are in safetensors files, each chunk by itself,
everything else is JSON; so a snapshot is read by any number of ranks, whose chunks are planned anew by
`torch.distributed.checkpoint`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scale_core import fault_points
from scale_core.comm.group import Group, group_of
from scale_core.consistency.all_ranks import CollectiveCall
from scale_core.consistency.flight_recorder import set_last_snapshot
from scale_core.errors import SnapshotError
from scale_core.snapshot.metadata import JSON, Manifest, read_manifest, write_manifest
from scale_core.snapshot.planner import GlobalPlan, LocalPlan, State, is_tensor, read_parts, write_part
from scale_core.state.validation import StateMismatch, check_alike, check_keys

_FINISHED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was read.

    Attributes:
        path: Its directory.
        step: The training step that it was taken after.
        state: The state it was read into: the caller's tensors, and the saved values of what is no tensor.
        extra: What the caller of `save_snapshot` added.
    """

    path: Path
    step: int
    state: dict[str, Any]
    extra: JSON


def save_snapshot(
    directory: str | os.PathLike[str], step: int, state: State, group: Group | None = None, extra: JSON = None
) -> Path:
    """Saves a state as `directory/step-<step>`, which is there in the end as a whole, or not at all.

    To be called on every rank of the group, with a directory that all of them see.

    Args:
        directory: Holds all snapshots of a run; it is created where it is missing.
        step: The training step, at least 0. A step that is saved already is not replaced.
        state: As `sharded_state_dict` returns it, with more keys if you like: `LocalShard`s, tensors (the lowest rank's
            of those that have the key) and values that JSON knows (the same on each rank that has the key).
        group: The ranks that hold the state together; the default group if None.
        extra: Anything that JSON knows, of rank 0: position in the data, schedule, random states.

    Returns:
        The snapshot's directory.

    Raises:
        SnapshotError: On every rank, whichever failed: the disk is full, the step is there already, a value is none
            that JSON knows. The snapshots that were there still are.
    """
    group = group_of(group)
    place = Path(directory) / f"step-{step:08d}"
    together = CollectiveCall(group, f"saving {place}", SnapshotError)
    made: list[Path] = []  # on rank 0: what must not stay if anything fails
    try:
        unfinished = together.rank0(lambda: _make_room(place, made))
        own = together.each_rank(lambda: LocalPlan.of(state, group))
        plans = together.all_ranks(lambda: (own.plan, own.values))
        everyones = together.each_rank(lambda: GlobalPlan.of(plans))
        written = together.all_ranks(lambda: write_part(unfinished, own, everyones.plans[group.rank], group, at_stage))
        together.rank0(lambda: _commit(unfinished, place, everyones.manifest(step, written, extra)))
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
    set_last_snapshot(str(place))
    return place


def load_snapshot(
    directory: str | os.PathLike[str],
    state: State | Callable[[State], State],
    group: Group | None = None,
    *,
    step: int | None = None,
    may_differ: tuple[str, ...] = (),
) -> Snapshot:
    """Reads the newest whole snapshot of a directory into a state, at any number of ranks.

    To be called on every rank of the group. Rank 0 decides which snapshot it is. Damaged and unfinished ones are
    passed over with a warning. All keys, shapes and dtypes are compared before the first tensor is written.

    Args:
        directory: As given to `save_snapshot`.
        state: What to read into: `LocalShard`s and tensors are overwritten in place, other values are returned. Or a
            function that returns it when it is given, for each saved key, a `SavedTensor` or the saved value.
        group: The ranks that hold the state together; the default group if None.
        step: This snapshot and no other.
        may_differ: Beginnings of keys that may be missing on either side.

    Raises:
        SnapshotError: On every rank: there is no whole snapshot (`FileNotFoundError` is the cause), or it is that of
            another model (`StateMismatch` is the cause; it names the first key that differs, and both values).
    """
    group = group_of(group)
    path, manifest = CollectiveCall(group, f"loading from {directory}", SnapshotError).rank0(
        lambda: _choose(Path(directory), step)
    )
    together = CollectiveCall(group, f"loading {path}", SnapshotError)
    target = together.each_rank(lambda: dict(state(manifest.saved) if callable(state) else state))
    everyones = {key for keys in together.all_ranks(lambda: list(target)) for key in keys}
    together.each_rank(lambda: _check(manifest, target, everyones, may_differ))
    together.each_rank(lambda: read_parts(path, manifest, target))
    values = {key: value for key, value in manifest.values.items() if key in target}
    set_last_snapshot(str(path))
    return Snapshot(path, manifest.step, {**target, **values}, manifest.extra)


def latest_snapshot(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the newest whole snapshot of a directory, as this rank alone sees it; None if there is none."""
    found = _newest(Path(directory))
    return None if found is None else found[0]


def at_stage(point: str, directory: Path) -> None:
    """A named stage in a save: "room", "tensor", "written", "manifest", "renamed"; see `fault_points`."""
    if fault_points.active is not None:
        fault_points.active(f"snapshot.{point}", str(directory))


def _make_room(place: Path, made: list[Path]) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    if place.exists():
        _set_aside_or_refuse(place)
    unfinished = place.with_name(f"{place.name}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}")
    unfinished.mkdir()
    made.append(unfinished)
    at_stage("room", unfinished)
    return unfinished


def _sweep(directory: Path) -> None:
    """Removes what killed processes of this machine left behind while saving."""
    for path in directory.iterdir():
        match = _UNFINISHED.fullmatch(path.name)
        if match and match["host"] == socket.gethostname() and not _is_alive(int(match["pid"])):
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _set_aside_or_refuse(place: Path) -> None:
    try:
        read_manifest(place)
    except ValueError as error:
        aside = place.with_name(f"{place.name}.damaged-{uuid.uuid4().hex}")
        place.rename(aside)
        warnings.warn(f"{error}; it is now {aside.name}", stacklevel=2)
    else:
        raise FileExistsError(f"{place} is saved already: save into another directory, or remove it first")


def _commit(unfinished: Path, place: Path, manifest: Manifest) -> None:
    write_manifest(unfinished, manifest)
    _sync_directory(unfinished)
    at_stage("manifest", unfinished)
    unfinished.rename(place)
    _sync_directory(place.parent)
    at_stage("renamed", place)


def _sync_directory(path: Path) -> None:
    """Puts a directory's entries on the disk: before that, a power cut may undo a rename or lose a new file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _choose(directory: Path, step: int | None) -> tuple[Path, Manifest]:
    if step is not None:
        path = directory / f"step-{step:08d}"
        return path, read_manifest(path)
    found = _newest(directory)
    if found is None:
        raise FileNotFoundError(f"there is no whole snapshot in {directory}")
    return found


def _newest(directory: Path) -> tuple[Path, Manifest] | None:
    if not directory.is_dir():
        return None
    finished = [(int(match[1]), path) for path in directory.iterdir() if (match := _FINISHED.fullmatch(path.name))]
    for _, path in sorted(finished, reverse=True):
        try:
            return path, read_manifest(path)
        except ValueError as error:
            warnings.warn(f"passing over a snapshot that is not whole: {error}", stacklevel=2)
    return None


def _check(manifest: Manifest, target: State, everyones: set[str], may_differ: tuple[str, ...]) -> None:
    saved = {key: value for key, value in manifest.saved.items() if not key.startswith(may_differ)}
    expected = [*target, *sorted(everyones - target.keys())]
    check_keys({key: None for key in expected if not key.startswith(may_differ)}, saved)
    for key, place in target.items():
        if key in manifest.tensors and is_tensor(place):
            check_alike(key, manifest.tensors[key], place)
        elif key in manifest.tensors or (key in manifest.values and is_tensor(place)):
            kinds = ("a tensor", "none") if key in manifest.tensors else ("no tensor", "one")
            raise StateMismatch(f"{key}: {kinds[0]} was saved, where {kinds[1]} is expected")
