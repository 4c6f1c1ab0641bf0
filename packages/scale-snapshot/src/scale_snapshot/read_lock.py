"""Locks that keep a snapshot from being removed while it is read.

Who reads a snapshot holds a shared lock of its manifest, and who removes it an exclusive one. They are locks of
`flock`: the system releases them when the process ends, on network file systems too. Where a file system has none, a
reader may lose its snapshot, which raises an error.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from scale_snapshot.file_lock import Lock, try_lock
from scale_snapshot.format.metadata import FILE

_REMOVAL_SECONDS = 5.0  # The lock of a removal is held for one rename.
_PAUSE_SECONDS = 0.01


class ReadLock:
    """The lock of a reader: from its making until `release`, or until nothing refers to it.

    It is also made where there is nothing to lock, or no lock can be had: the next read raises the error.

    Raises:
        FileNotFoundError: The snapshot was removed in this moment.
    """

    def __init__(self, directory: Path) -> None:
        self._descriptor: int | None = None
        manifest = directory / FILE
        try:
            self._descriptor = _open(manifest, for_exclusive=False)
            give_up = time.monotonic() + _REMOVAL_SECONDS
            while try_lock(self._descriptor, exclusive=False) is Lock.HELD and time.monotonic() < give_up:
                time.sleep(_PAUSE_SECONDS)
        except OSError:
            return
        try:
            is_there = os.path.samestat(os.stat(manifest), os.fstat(self._descriptor))
        except OSError:
            is_there = False
        if not is_there:
            self.release()
            raise FileNotFoundError(f"{directory} was removed while it was opened")

    def release(self) -> None:
        """Lets go of it; a second call does nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __del__(self) -> None:
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.release()


def rename_unread(directory: Path, to: Path) -> bool:
    """Renames a snapshot, unless somebody reads it; whether it did."""
    with ExitStack() as closing:
        with suppress(OSError):  # A folder that can't be opened is removed without a lock.
            descriptor = _open(directory / FILE, for_exclusive=True)
            closing.callback(os.close, descriptor)
            if try_lock(descriptor, exclusive=True) is Lock.HELD:
                return False
        directory.rename(to)
    return True


def _open(file: Path, *, for_exclusive: bool) -> int:
    """Opens a file for a lock of it; an exclusive one needs the right to write on NFS."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if for_exclusive:
        with suppress(OSError):
            return os.open(file, os.O_RDWR | flags)
    return os.open(file, os.O_RDONLY | flags)
