"""The errors of saving and loading."""

from __future__ import annotations

from scale_core.errors import ScaleError


class SnapshotError(ScaleError):
    """Saving or loading failed, on every rank; `__cause__` is the original exception."""


class DamagedSnapshotError(SnapshotError):
    """A snapshot is damaged: a checksum, a length or a file differs; nothing was loaded from it."""


class NewerSnapshotError(SnapshotError):
    """A newer version of scale-snapshot wrote the snapshot, in a format that this one does not know."""


class ForeignCheckpointError(SnapshotError):
    """The path has a checkpoint of another library; the message says which, and how it is converted."""
