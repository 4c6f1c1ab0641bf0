"""Snapshots: the state of a training run on disk, complete or not there, loaded at any number of ranks.

Begin with `snapshot`; `planner` says which elements each rank writes and reads, `metadata` what a snapshot holds.
"""

from scale_core.errors import SnapshotError
from scale_core.snapshot.snapshot import Snapshot, latest_snapshot, load_snapshot, save_snapshot

__all__ = ["Snapshot", "SnapshotError", "latest_snapshot", "load_snapshot", "save_snapshot"]
