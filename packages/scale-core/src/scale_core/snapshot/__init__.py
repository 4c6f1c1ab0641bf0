"""Snapshots: the state of a training run on disk, complete or not there, verified, loaded at any number of ranks.

Begin with `snapshot`; `planner` says which elements each rank writes and reads, `metadata` what a snapshot holds.
"""

from scale_core.errors import DamagedSnapshotError, NewerSnapshotError, SnapshotError
from scale_core.snapshot.snapshot import Snapshot, latest_snapshot, load_snapshot, save_snapshot
from scale_core.snapshot.verification import verify_snapshot

__all__ = [
    "DamagedSnapshotError",
    "NewerSnapshotError",
    "Snapshot",
    "SnapshotError",
    "latest_snapshot",
    "load_snapshot",
    "save_snapshot",
    "verify_snapshot",
]
