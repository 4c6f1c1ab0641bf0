"""Checkpoints on disk that are whole or not there.

A job is killed at any moment, a disk fills up, one rank fails alone. So a snapshot is written beside its place, in a
directory that no reader looks at, by all ranks; when every byte of every rank is on the disk, rank 0 writes the
manifest and renames the directory. What is written once is never touched again. Nothing is pickled: tensors lie in
safetensors files, each box of a tensor by itself, everything else is JSON; so a snapshot is read by any number of
ranks, whose boxes are cut anew by the planner of `torch.distributed.checkpoint`.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.optim import Optimizer

from scale_core.boxes import Box, LocalShard
from scale_core.group import Group, group_of
from scale_core.manifest import JSON, Manifest, SavedBox, read_manifest, write_manifest
from scale_core.state import (
    SavedTensor,
    StateMismatch,
    check_alike,
    load_sharded_state_dict,
    target_state_dict,
)
from scale_core.tensorfile import Entry, read_rows, write_tensors

State: TypeAlias = Mapping[str, Any]
T = TypeVar("T")

_FINISHED = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"step-\d{8,}\.tmp-(?P<host>.+)-(?P<pid>\d+)-[0-9a-f]+")


class SnapshotError(RuntimeError):
    """Saving or loading failed, on every rank alike; `__cause__` is what was raised where it failed."""


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
        state: As `sharded_state_dict` returns it, with more keys if you like: `LocalShard`s, tensors (the same on each
            rank that has the key) and values that JSON knows (the same on each rank that has the key).
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
    made: list[Path] = []  # on rank 0: what must not stay if anything fails
    doing = f"saving {place}"
    try:
        unfinished = _on_rank_0(doing, group, lambda: _make_room(place, made))
        written = _together(doing, group, lambda: _write_own(unfinished, state, group))
        _on_rank_0(doing, group, lambda: _commit(unfinished, place, _manifest(step, written, extra)))
        made.clear()
    finally:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
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
    doing = f"loading from {directory}"
    path, manifest = _on_rank_0(doing, group, lambda: _choose(Path(directory), step))
    doing = f"loading {path}"
    target = _together(doing, group, lambda: dict(state(manifest.saved) if callable(state) else state), share=False)[0]
    everyones = set().union(*_together(doing, group, lambda: set(target)))
    _together(doing, group, lambda: _check(manifest, target, everyones, may_differ))
    _together(doing, group, lambda: _read_own(path, manifest, target))
    values = {key: value for key, value in manifest.values.items() if key in target}
    return Snapshot(path, manifest.step, {**target, **values}, manifest.extra)


def load_training(
    directory: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    group: Group | None = None,
    *,
    step: int | None = None,
) -> Snapshot:
    """Reads the newest whole snapshot into a model and its optimizer, which may be fresh; else as `load_snapshot`.

    Keys outside `model.` and `optim.` are left alone, and without an optimizer so is its state.
    """
    skipped = lambda saved: [key for key in saved if not key.startswith(("model.", "optim.") if optimizer else "model.")]  # noqa: E731
    raise NotImplementedError(skipped)
