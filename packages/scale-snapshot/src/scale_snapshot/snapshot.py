"""Checkpoints on disk that are complete or not there, and verified before anything is loaded.

A job is killed at any moment, a disk fills up, one of the ranks fails. So all ranks write a snapshot in a temporary
directory that no reader looks at; when every byte is on the disk, rank 0 writes the manifest and renames the directory.
A saved snapshot is never changed. Disks and networks change bytes without a word: so every byte has a checksum, and all
ranks have verified the files before the first of them overwrites a tensor. Nothing is pickled: tensors are in
safetensors files, each chunk by itself, everything else is JSON; so a snapshot is read by any number of ranks, whose
chunks are planned again by `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import socket
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from scale_core import fault_points
from scale_core.arguments import checked_arguments
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.consistency.all_ranks import CollectiveCall, Progress
from scale_core.consistency.flight_recorder import title_of_ranks
from scale_core.errors import ScaleError, set_last_snapshot
from scale_core.state.validation import StateDifferences, StateMismatch, compare_states
from scale_snapshot.errors import DamagedSnapshotError, ForeignCheckpointError, SnapshotError
from scale_snapshot.finite import first_nonfinite
from scale_snapshot.foreign import Format, recognize
from scale_snapshot.format.metadata import INDEX, JSON, Manifest, check_files, read_manifest, write_manifest
from scale_snapshot.format.planner import GlobalPlan, LocalPlan, State, plan_reads, write_part
from scale_snapshot.format.reads import Read, blocks_of, read_tensors
from scale_snapshot.format.state_codec import decode_extra, encode_extra
from scale_snapshot.format.stored_file import is_temporary, retry
from scale_snapshot.format.verification import (
    RankReads,
    blocks_to_verify,
    describe_damage,
    find_damage,
    verify_snapshot,
)
from scale_snapshot.read_lock import ReadLock

_FINISHED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")
_IDLE_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Snapshot:
    """A snapshot that was read.

        >>> import tempfile, torch
        >>> import scale_snapshot
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 3)
        >>> path = scale_snapshot.save(folder, 12, {"model": model}, extra={"epoch": 2})
        >>> snapshot = scale_snapshot.load(folder, {"model": model})
        >>> snapshot.step, snapshot.extra
        (12, {'epoch': 2})

    Attributes:
        path: Its directory.
        step: The training step that it was taken after.
        state: The state it was read into: the caller's tensors, and other saved values.
        extra: The caller's addition to `save_snapshot`.
        left_out: The keys that did not fit, and that `strict=False` has not read.

    See also: [the guide to checkpoints](../guides/saving.md).
    """

    path: Path
    step: int
    state: dict[str, Any]
    extra: Any
    left_out: frozenset[str] = frozenset()


@checked_arguments
def save_snapshot(
    directory: str | os.PathLike[str], step: int, state: State, process_group: GroupLike = None, extra: Any = None
) -> Path:
    """Saves a state as `directory/step-<step>`, which is complete in the end, or not there.

    To be called on every rank of the group, with a directory that all of them see.

    Args:
        directory: Holds all snapshots of a run; it is created where it is missing.
        step: The training step, at least 0. A step that is saved already is not replaced.
        state: As `sharded_state_dict` returns it, with more keys if you like: `LocalShard`s, tensors (the lowest rank's
            of those that have the key) and values that JSON knows (the same on each rank that has the key).
        process_group: The ranks that hold the state together; the default group if None.
        extra: Plain Python values of rank 0: position in the data, schedule, random states. They may hold tuples, sets,
            bytes, infinities and numpy numbers, and no tensors.

    Returns:
        The snapshot's directory.

    Raises:
        SnapshotError: On every rank, if any rank fails: the disk is full, the step exists already, or JSON can't hold a
            value. The snapshots that were there still are.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import save_snapshot
        >>> save_snapshot(tempfile.mkdtemp(), 1, {"weight": torch.ones(3), "epoch": 2}).name
        'step-00000001'

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    return write_state(directory, step, lambda: state, group_of(process_group), extra)


def write_state(
    directory: str | os.PathLike[str], step: int, state: Callable[[], State], group: Group, extra: Any
) -> Path:
    """Writes the result of `state`, as `save_snapshot`; if `state` raises on one rank, all ranks raise.

    DCP's `planner.create_local_plan` is `LocalPlan`, its `create_global_plan` is `GlobalPlan`, and its
    `StorageWriter.write_data` is `write_part`.
    """
    _check_arguments(group, "save_snapshot", directory=os.fspath(directory), step=step)
    snapshot_path = Path(directory) / f"step-{step:08d}"
    save = ""

    def name_if_committed() -> None:
        """Rank 0 may be lost when the directory has its name: then this snapshot is the last one."""
        if _is_save(snapshot_path, save):
            set_last_snapshot(str(snapshot_path))

    def make_room(progress: Progress) -> tuple[Path, str]:
        if group.rank > 0:
            return snapshot_path, ""
        encoded_extra.append(encode_extra(extra))
        return _make_room(snapshot_path, created, progress), uuid.uuid4().hex

    together = CollectiveCall(group, f"saving {snapshot_path}", SnapshotError, on_lost=name_if_committed)
    created: list[Path] = []  # on rank 0: removed if anything fails
    encoded_extra: list[JSON] = []  # on rank 0
    try:
        unfinished, save = together.all_ranks_with_progress(make_room)[0]
        local_plan = together.each_rank(lambda: LocalPlan.of(state(), group))
        plans = together.all_ranks(lambda: (local_plan.plan, local_plan.values))
        everyones = together.each_rank(lambda: GlobalPlan.of(plans))
        plan = everyones.plans[group.rank]
        written = together.all_ranks_with_progress(
            partial(write_part, unfinished, save, local_plan, plan, group, at_stage)
        )
        together.rank0(
            lambda: _commit(unfinished, snapshot_path, everyones.manifest(save, step, written, *encoded_extra))
        )
    finally:
        for path in created:
            shutil.rmtree(path, ignore_errors=True)
    set_last_snapshot(str(snapshot_path))
    return snapshot_path


@checked_arguments
def load_snapshot(
    directory: str | os.PathLike[str],
    state: State | Callable[[State], State],
    process_group: GroupLike = None,
    *,
    step: int | None = None,
    strict: bool = True,
    cast: bool = False,
) -> Snapshot:
    """Reads the newest complete snapshot of a directory into a state, at any number of ranks.

    To be called on every rank of the group. Rank 0 decides which snapshot it is. All keys, shapes and dtypes are
    compared, and all files verified against their checksums, before the first tensor is overwritten. Without `step`,
    damaged and unfinished snapshots are passed over with a warning, snapshots of a newer version are not.

    Args:
        directory: As given to `save_snapshot`.
        state: The destinations: `LocalShard`s and tensors are overwritten in place, other values are returned. Or a
            function that returns the destinations. It is called with a `SavedTensor` or the saved value by key, and
            again for the next snapshot if one is skipped.
        process_group: The ranks that hold the state together; the default group if None.
        step: This snapshot and no other.
        strict: False loads matching values, leaves the rest unchanged, and warns with a list of mismatches.
        cast: Whether floating-point numbers and integers are converted to the dtypes of `state`.

    Raises:
        DamagedSnapshotError: On every rank: the snapshot of `step` is damaged. The error names the newest
            older one that is.
        NewerSnapshotError: On every rank: a newer version of scale-core wrote the one that was to be loaded.
        ForeignCheckpointError: On every rank: the directory is a checkpoint of another library; the error says how it
            is converted.
        SnapshotError: On every rank: there is no complete snapshot (the cause is a `FileNotFoundError`), it belongs to
            a different model (the cause is a `StateMismatch`, which lists all differences), or the arguments differ
            between ranks.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import load_snapshot, save_snapshot
        >>> folder = tempfile.mkdtemp()
        >>> path = save_snapshot(folder, 1, {"weight": torch.ones(3), "epoch": 2})
        >>> state = {"weight": torch.zeros(3), "epoch": 0}
        >>> load_snapshot(folder, state).state
        {'weight': tensor([1., 1., 1.]), 'epoch': 2}

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    group = group_of(process_group)
    _check_arguments(group, "load_snapshot", directory=os.fspath(directory), step=step, strict=strict, cast=cast)
    folder, rules = Path(directory), (strict, cast)
    looking = CollectiveCall(group, f"loading from {folder}", SnapshotError)
    if step is not None:
        path = folder / f"step-{step:08d}"
        paths = _list_to_load(looking, folder, set())
        older = [other for other in paths if _step_of(other) < step]
        try:
            return _load(path, state, group, *rules)
        except DamagedSnapshotError as error:
            raise DamagedSnapshotError(f"{error}. {_offer_older(older, group)}") from error
        except SnapshotError as error:
            raise _explained(error, older) from error.__cause__
    passed_over: set[Path] = set()
    # Others may save and remove snapshots meanwhile: so the folder is listed again for each one.
    while paths := _list_to_load(looking, folder, passed_over):
        path, *older = paths
        try:
            return _load(path, state, group, *rules)
        except SnapshotError as error:
            if not looking.rank0(partial(os.path.lexists, path)):  # It was removed.
                continue
            if not isinstance(error, DamagedSnapshotError):
                raise _explained(error, older) from error.__cause__
            passed_over.add(path)
            if group.rank == 0:
                warnings.warn(f"passing over an incomplete snapshot: {error}", stacklevel=3)
    why = "" if folder.is_dir() else ", which is not a directory" if folder.exists() else ", and no such directory"
    missing = FileNotFoundError(f"there is no complete snapshot in {folder}{why}")
    raise SnapshotError(f"{looking.doing} failed: {missing}") from missing


def _list_to_load(looking: CollectiveCall, folder: Path, passed_over: set[Path]) -> list[Path]:
    """The snapshots that are left to try, the newest first, as rank 0 sees them."""

    def find(progress: Progress) -> list[Path]:
        if looking.group.rank > 0:
            return []
        finished = _finished(folder, progress)
        return [path for path in finished if path not in passed_over] if finished else _refuse_foreign(folder)

    return looking.all_ranks_with_progress(find)[0]


def _explained(error: SnapshotError, older: list[Path]) -> SnapshotError:
    """Says of a snapshot that can't be read at the moment that this is not damage, and how to go back nevertheless."""
    if not is_temporary(error.__cause__):
        return error
    instead = (
        f", or load the one before it, step={_step_of(older[0])}, and save into another directory" if older else ""
    )
    return type(error)(
        f"{error}. It can't be read now, which says nothing about damage: load it again when the file system answers"
        f"{instead}"
    )


def _load(path: Path, state: State | Callable[[State], State], group: Group, strict: bool, cast: bool) -> Snapshot:
    """Reads one snapshot, which nobody removes meanwhile."""
    with ExitStack() as reading:

        def lock() -> None:
            if os.path.lexists(path):
                reading.enter_context(ReadLock(path))

        CollectiveCall(group, f"loading {path}", SnapshotError).rank0(lock)
        return _load_locked(path, state, group, strict, cast)


def _load_locked(
    path: Path, state: State | Callable[[State], State], group: Group, strict: bool, cast: bool
) -> Snapshot:
    together = CollectiveCall(group, f"loading {path}", SnapshotError)
    manifest = together.all_ranks_with_progress(partial(_read_manifest_on_rank0, path, group))[0]
    assert manifest is not None, "rank 0 has read it"
    target: dict[str, Any] = {}

    def compare() -> StateDifferences:
        try:
            target.update(state(manifest.saved) if callable(state) else state)
        except StateMismatch as error:
            if error.differences is None or not strict or cast:
                raise
            return error.differences  # Other ranks may have found more.
        return compare_states({INDEX: None, **target}, {INDEX: None, **manifest.saved})

    differences = StateDifferences.of_ranks(together.all_ranks(compare))
    if cast:
        differences.other_dtype.clear()
    left_out = frozenset(differences.keys)
    if differences and strict:
        mismatch = StateMismatch(differences.refusal(), differences)
        raise SnapshotError(f"{together.doing} failed: {mismatch}") from mismatch
    fits = {key: destination for key, destination in target.items() if key not in left_out}
    reads: list[Read] = []

    def plan() -> RankReads:
        reads.extend(plan_reads(manifest, fits))
        return RankReads(socket.gethostname(), blocks_of(reads, manifest.block_bytes))

    _verify(together, path, manifest, together.all_ranks(plan))
    if differences and group.rank == 0:
        warnings.warn(f"{path} is loaded in part, as strict=False says: {differences}", stacklevel=4)
    overwriting = CollectiveCall(group, f"loading {path}, which has overwritten a part of the state,", SnapshotError)
    overwriting.all_ranks_with_progress(partial(read_tensors, path, reads))
    values = {key: value for key, value in manifest.values.items() if key in fits}
    set_last_snapshot(str(path))
    return Snapshot(path, manifest.step, {**target, **values}, decode_extra(manifest.extra), left_out)


def _read_manifest_on_rank0(path: Path, group: Group, progress: Progress) -> Manifest | None:
    if group.rank > 0:
        return None
    if not os.path.lexists(path):
        neighbors = ", ".join(other.name for other in _finished(path.parent)[:5])
        raise FileNotFoundError(f"there is no {path}; the newest there are: {neighbors or 'none'}")
    return read_manifest(path, progress)


def _verify(together: CollectiveCall, path: Path, manifest: Manifest, reads: list[RankReads]) -> None:
    """Verifies all blocks of a snapshot, which the ranks share out among them."""
    local_blocks = blocks_to_verify(manifest, reads, together.group.rank)
    damage = together.all_ranks_with_progress(partial(find_damage, path, manifest, local_blocks))
    if any(damage):
        raise DamagedSnapshotError(describe_damage(path, list(dict.fromkeys(itertools.chain(*damage)))))


def _offer_older(paths: list[Path], group: Group) -> str:
    """The snapshot to load in place of a damaged one: the first of these whose bytes are all verified."""
    for older in paths:
        together = CollectiveCall(group, f"verifying {older}", SnapshotError)
        try:
            manifest = together.all_ranks_with_progress(partial(_read_manifest_on_rank0, older, group))[0]
            assert manifest is not None, "rank 0 has read it"
            _verify(together, older, manifest, [RankReads("", {})] * group.size)
        except SnapshotError:
            continue
        return f"The newest older complete snapshot is {older}: load that, step={_step_of(older)}"
    return "No older snapshot is complete"


@checked_arguments
def latest_snapshot(
    directory: str | os.PathLike[str],
    *,
    verify: bool = False,
    finite: bool = False,
    progress: Progress = lambda num_bytes: None,
) -> Path | None:
    """Returns the newest complete snapshot of a directory, as this rank alone sees it; None if there is none.

    Args:
        directory: As given to `save_snapshot`.
        verify: Whether to read all of it and compare the checksums, as loading it does; else the manifest and the
            lengths of the files are enough.
        finite: Whether to pass over snapshots that have a NaN or an infinity in a tensor; masks, of zeros and
            infinities alone, don't count. The result is verified.
        progress: Called with the number of bytes that were verified since the last call.

    Raises:
        NewerSnapshotError: A newer version of scale-core wrote the newest.
        OSError: The newest can't be read now.

    Examples:
        >>> import tempfile, torch
        >>> from scale_snapshot import latest_snapshot, save
        >>> folder, model = tempfile.mkdtemp(), torch.nn.Linear(4, 3)
        >>> path = save(folder, 1, {"model": model})
        >>> latest_snapshot(folder, finite=True).name  # the newest without NaN or infinity
        'step-00000001'

    See also: [the guide to checkpoints](../guides/saving.md).
    """
    passed_over: set[Path] = set()
    while paths := [path for path in _finished(Path(directory)) if path not in passed_over]:
        path = paths[0]
        try:
            with ReadLock(path):
                if finite and (key := first_nonfinite(path, read_manifest(path), progress)):
                    passed_over.add(path)
                    warnings.warn(f"passing over {path}: {key} has a NaN or an infinity", stacklevel=3)
                    continue
                verify_snapshot(path, progress) if verify or finite else read_manifest(path)
        except (DamagedSnapshotError, FileNotFoundError) as error:
            if os.path.lexists(path):  # Else it was removed, and the folder is listed again.
                passed_over.add(path)
                warnings.warn(f"passing over an incomplete snapshot: {error}", stacklevel=3)
        else:
            return path
    if not passed_over and (recognized := recognize(directory)) is not None and recognized.is_foreign:
        warnings.warn(recognized.advice(), stacklevel=3)
    return None


def at_stage(point: str, directory: Path) -> None:
    """A named stage in a save: "room", "tensor", "written", "manifest", "renamed"; see `fault_points`."""
    if fault_points.active is not None:
        fault_points.active(f"snapshot.{point}", str(directory))


def _make_room(place: Path, made: list[Path], progress: Progress) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    _sweep(place.parent)
    if place.exists():
        _set_aside_or_refuse(place, progress)
    unfinished = place.with_name(f"{place.name}.tmp-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}")
    unfinished.mkdir()
    made.append(unfinished)
    at_stage("room", unfinished)
    return unfinished


def _sweep(directory: Path) -> None:
    """Removes leftovers of killed processes: all of this machine, and of others those that have not grown for a day."""
    for path in directory.iterdir():
        if match := _UNFINISHED.fullmatch(path.name):
            is_local = match["host"] == socket.gethostname()
            if not _is_alive(int(match["pid"])) if is_local else _idle_seconds(path) > _IDLE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _idle_seconds(directory: Path) -> float:
    try:
        return time.time() - max(path.stat().st_mtime for path in [directory, *directory.iterdir()])
    except OSError:
        return 0.0  # Somebody is at it.


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _set_aside_or_refuse(place: Path, progress: Progress) -> None:
    """Removes a damaged snapshot, for example one that was passed over, so that its step can be saved again."""
    try:
        verify_snapshot(place, progress)
    except DamagedSnapshotError as error:
        aside = place.with_name(f"{place.name}.damaged-{uuid.uuid4().hex}")
        place.rename(aside)
        warnings.warn(f"{error}; it is now {aside.name}", stacklevel=2)
    else:
        raise FileExistsError(f"{place} is saved already: save into another directory, or remove it first")


def _commit(unfinished: Path, place: Path, manifest: Manifest) -> None:
    check_files(unfinished, manifest)
    write_manifest(unfinished, manifest)
    sync(unfinished)
    at_stage("manifest", unfinished)
    try:
        unfinished.rename(place)
    except OSError as error:
        if not _is_save(place, manifest.save):
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                raise FileExistsError(f"{place} was saved by another program meanwhile, and stays unchanged") from error
            raise
        # A network file system may repeat a rename whose answer was lost, and says that there is nothing to rename.
    try:
        sync(place.parent)
    except OSError as error:
        warnings.warn(
            f"{place} is complete, but a power cut may still undo its name: syncing {place.parent} has failed "
            f"({error}). Look at the file system before you rely on this snapshot",
            stacklevel=2,
        )
    at_stage("renamed", place)


def _is_save(place: Path, save: str) -> bool:
    """Whether a directory has the manifest of one save."""
    try:
        return read_manifest(place).save == save
    except (OSError, ScaleError):
        return False


def sync(path: Path) -> None:
    """Puts a file, or a directory's entries, on the disk: before that, a power cut may undo a rename or lose a file."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems, as those of network mounts, have no such call for directories.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS):
            raise
    finally:
        os.close(descriptor)


def _finished(directory: Path, progress: Progress = lambda num_bytes: None) -> list[Path]:
    """The snapshots of a directory by name, the newest first; their content is not looked at."""
    try:
        names = retry(partial(os.listdir, directory), directory, progress)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted((directory / name for name in names if _FINISHED.fullmatch(name)), key=_step_of, reverse=True)


def _refuse_foreign(path: Path) -> list[Path]:
    """Raises if this is a checkpoint of another library, or one snapshot where the folder of it is expected."""
    try:
        foreign = recognize(path)
    except OSError:  # Nothing can be read; the error says so.
        return []
    if foreign is not None and foreign.format is Format.SNAPSHOT:
        raise FileNotFoundError(f"{path} is one snapshot: pass the directory that it is in, {path.parent}")
    if foreign is not None and foreign.is_foreign:
        raise ForeignCheckpointError(foreign.advice())
    return []


def _step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _check_arguments(group: Group, call: str, **given: Any) -> None:
    """Refuses arguments that differ between the ranks, and steps that are none."""
    together = CollectiveCall(group, f"calling {call}", SnapshotError)
    everyones = together.all_ranks(lambda: given)
    for name in given:
        ranks: dict[str, list[int]] = {}
        for rank, arguments in enumerate(everyones):
            ranks.setdefault(repr(arguments.get(name)), []).append(rank)
        if len(ranks) > 1:
            values = "; ".join(
                f"{value} on {title_of_ranks(ranks_with_value)}" for value, ranks_with_value in ranks.items()
            )
            raise SnapshotError(f"{call}: {name} differs between the ranks: {values}. Pass the same on all of them")
    step = given["step"]
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(f"{call}: expected a step of at least 0, got {step!r}")
