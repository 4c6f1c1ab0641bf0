"""Reads snapshots of scale, one tensor at a time; all that this folder knows of their files stands here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from scale_snapshot.convert.lazy_tensor import LazyTensor
from scale_snapshot.convert.naming import StoredState
from scale_snapshot.errors import DamagedSnapshotError
from scale_snapshot.format.checksums import ranges_of
from scale_snapshot.format.metadata import Manifest, read_manifest
from scale_snapshot.format.planner import plan_reads
from scale_snapshot.format.reads import blocks_of, read_tensors
from scale_snapshot.format.verification import describe_damage, find_damage
from scale_snapshot.read_lock import ReadLock


@dataclass(frozen=True)
class SnapshotSummary:
    """The summary of a snapshot's manifest: the step, the number of ranks that wrote it, and its content."""

    step: int
    num_ranks: int
    num_tensors: int
    num_bytes: int


def describe_snapshot(directory: Path) -> SnapshotSummary:
    """Reads a snapshot's manifest and compares the lengths of its files.

    Raises:
        SnapshotError: It is damaged (`DamagedSnapshotError`), newer (`NewerSnapshotError`), or can't be read.
    """
    manifest = read_manifest(directory)
    num_bytes = sum(file.num_bytes for file in manifest.files.values())
    return SnapshotSummary(manifest.step, len(manifest.files), len(manifest.tensors), num_bytes)


def read_snapshot(directory: Path) -> StoredState:
    """Returns the content of a snapshot's directory; each block of a file is verified before the first read of it.

    Raises:
        SnapshotError: It is damaged (`DamagedSnapshotError`), newer (`NewerSnapshotError`), or can't be read.
    """
    lock = ReadLock(directory)
    manifest = read_manifest(directory)
    reader = _VerifiedReader(directory, manifest, lock)
    tensors = {key: LazyTensor(saved.shape, saved.dtype, reader.of(key)) for key, saved in manifest.tensors.items()}
    return StoredState(tensors, dict(manifest.values), manifest.extra, manifest.step)


class _VerifiedReader:
    """Reads tensors of a snapshot, which stays for as long, and remembers which blocks have been verified."""

    def __init__(self, directory: Path, manifest: Manifest, lock: ReadLock) -> None:
        self._directory, self._manifest, self._lock = directory, manifest, lock
        self._verified: dict[str, set[int]] = {}

    def of(self, key: str) -> Callable[[], Tensor]:
        return lambda: self._read(key)

    def _read(self, key: str) -> Tensor:
        saved = self._manifest.tensors[key]
        tensor = torch.empty(saved.shape, dtype=saved.dtype)
        alone = replace(self._manifest, tensors={key: saved}, chunks={key: self._manifest.chunks[key]})
        reads = plan_reads(alone, {key: tensor})
        self._verify(blocks_of(reads, self._manifest.block_bytes))
        read_tensors(self._directory, reads)
        return tensor

    def _verify(self, blocks: dict[str, list[tuple[int, int]]]) -> None:
        new: dict[str, list[tuple[int, int]]] = {}
        for file, ranges in blocks.items():
            # The first block too, by which a file of another save is found out.
            needed = {0, *(block for first, last in ranges for block in range(first, last))}
            new[file] = ranges_of(needed - self._verified.get(file, set()))
            self._verified.setdefault(file, set()).update(needed)
        if damage := find_damage(self._directory, self._manifest, new):
            self._verified.clear()
            raise DamagedSnapshotError(describe_damage(self._directory, damage))
