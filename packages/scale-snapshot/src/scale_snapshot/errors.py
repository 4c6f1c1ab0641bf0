"""The errors of saving and loading."""

from __future__ import annotations

from scale_core.errors import ScaleError


class SnapshotError(ScaleError):
    """Saving or loading failed, on every rank; `__cause__` is the original exception.

    See also: [what to do about a SnapshotError](../guides/troubleshooting.md#snapshoterror).
    """


class DamagedSnapshotError(SnapshotError):
    """A snapshot is damaged: a checksum, a length or a file differs; nothing was loaded from it.

    See also: [what to do about a DamagedSnapshotError](../guides/troubleshooting.md#damagedsnapshoterror).
    """


class NewerSnapshotError(SnapshotError):
    """A newer version of scale-snapshot wrote the snapshot, in a format that this one does not know.

    See also: [what to do about a NewerSnapshotError](../guides/troubleshooting.md#newersnapshoterror).
    """


class ForeignCheckpointError(SnapshotError):
    """The path has a checkpoint of another library; the message says which, and how it is converted.

    See also: [what to do about a ForeignCheckpointError](../guides/troubleshooting.md#foreigncheckpointerror).
    """
