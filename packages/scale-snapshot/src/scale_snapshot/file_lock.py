"""Locks of files between processes, which the system releases when a process ends, however it ends."""

from __future__ import annotations

from enum import Enum


class Lock(Enum):
    """The result of `try_lock`."""

    TAKEN = "taken"
    HELD = "held by another"
    UNSUPPORTED = "there are no locks on this file system"


def try_lock(descriptor: int, *, exclusive: bool) -> Lock:
    """Locks an open file with `flock`, until it is closed; on NFS an exclusive lock needs a file open for writing."""
    import fcntl  # Not on Windows.

    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        return Lock.HELD
    except OSError:
        return Lock.UNSUPPORTED
    return Lock.TAKEN
