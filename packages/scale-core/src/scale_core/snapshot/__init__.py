"""Snapshots: the state of a training run on disk, complete or not there, verified, loaded at any number of ranks.

Begin with `saving`, the functions for users; below it `objects` makes a flat state of objects, and `snapshot` writes
that. `format/` has the files: their content, their writers, and their verification.
"""

from scale_core.errors import DamagedSnapshotError, ForeignCheckpointError, NewerSnapshotError, SnapshotError
from scale_core.snapshot.background import AsyncSave
from scale_core.snapshot.format.verification import verify_snapshot
from scale_core.snapshot.rng_state import RandomState
from scale_core.snapshot.saving import async_save, latest, load, save
from scale_core.snapshot.snapshot import Snapshot, latest_snapshot, load_snapshot, save_snapshot
from scale_core.snapshot.stateful import FromRank0, PerRank

__all__ = [
    "AsyncSave",
    "DamagedSnapshotError",
    "ForeignCheckpointError",
    "FromRank0",
    "NewerSnapshotError",
    "PerRank",
    "RandomState",
    "Snapshot",
    "SnapshotError",
    "async_save",
    "latest",
    "latest_snapshot",
    "load",
    "load_snapshot",
    "save",
    "save_snapshot",
    "verify_snapshot",
]
