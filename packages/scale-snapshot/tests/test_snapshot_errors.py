from scale_core.errors import ScaleDistributedError, ScaleError
from scale_snapshot import DamagedSnapshotError, ForeignCheckpointError, NewerSnapshotError, SnapshotError


def test_a_failed_save_is_no_error_between_ranks() -> None:
    """A program that ends on a ScaleDistributedError goes on after a SnapshotError: the group still works."""
    assert issubclass(SnapshotError, ScaleError)
    assert not issubclass(SnapshotError, ScaleDistributedError)
    assert all(issubclass(kind, SnapshotError) for kind in (DamagedSnapshotError, ForeignCheckpointError))
    assert issubclass(NewerSnapshotError, SnapshotError)
