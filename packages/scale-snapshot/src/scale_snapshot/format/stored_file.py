"""Files that are read, and read again where the file system fails for a moment.

A network file system may answer one read with an error and the next one as if nothing had happened. So such a read is
repeated for `SCALE_READ_RETRY_SECONDS` (60 by default). A failure after that is an error of this moment, and not
damage: damage is an error in the file itself.
"""

from __future__ import annotations

import errno
import os
import stat
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_RETRY_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
# A disk, a server, or the way to it, does not answer now.
_TEMPORARY = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENOLCK),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ECONNABORTED, errno.ECONNRESET, errno.ECONNREFUSED, errno.ENOTCONN, errno.ESHUTDOWN),
        getattr(errno, "EREMOTEIO", errno.EIO),
    }
)
_BUFFERS_AT_ONCE = 512  # The system takes 1024.


def is_temporary(error: BaseException | None) -> bool:
    """Whether an exception may not come again a moment later."""
    return isinstance(error, OSError) and error.errno in _TEMPORARY


def retry(
    read: Callable[[], T],
    path: Path,
    progress: Callable[[int], None] = lambda num_bytes: None,
    retry_seconds: float | None = None,
) -> T:
    """Returns the result of `read`; calls it again for `SCALE_READ_RETRY_SECONDS` while the file system fails.

    Args:
        read: Reads something of `path`.
        path: For the warning, and for the error.
        progress: Called with 0 before each further try, so that other ranks know that this one goes on.
        retry_seconds: In place of the variable.

    Raises:
        OSError: It still fails, or fails in a way that time does not mend.
    """
    began, pause = time.monotonic(), _FIRST_PAUSE_SECONDS
    limit = (
        float(os.environ.get("SCALE_READ_RETRY_SECONDS", _RETRY_SECONDS)) if retry_seconds is None else retry_seconds
    )
    while True:
        try:
            return read()
        except OSError as error:
            if not is_temporary(error):
                raise
            if time.monotonic() + pause - began > limit:
                text = f"{error.strerror}, also when tried again for {limit:g} s" if limit else error.strerror
                raise OSError(error.errno, text, os.fspath(path)) from error
            if pause == _FIRST_PAUSE_SECONDS:
                warnings.warn(f"{path}: {error.strerror}; trying again for {limit:g} s", stacklevel=2)
        progress(0)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def is_damage(error: OSError | EOFError) -> bool:
    """Whether an exception means that a file is damaged, and not that this process can't read it now."""
    damage = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL)
    return isinstance(error, EOFError) or error.errno in damage


@contextmanager
def opened(
    path: Path, progress: Callable[[int], None] = lambda num_bytes: None, retry_seconds: float | None = None
) -> Iterator[StoredFile]:
    """A file that is read. A link or a special file (a pipe would wait for a writer) raises an error.

    `progress` is called with the number of bytes that were read since the last call; with 0 before a read is repeated.
    """
    file = StoredFile(path, progress, retry_seconds)
    try:
        yield file
    finally:
        file.close()


class StoredFile:
    """An open file for reads of any bytes; it is opened again if a read has failed.

    Attributes:
        num_bytes: Its length.
    """

    def __init__(
        self,
        path: Path,
        progress: Callable[[int], None] = lambda num_bytes: None,
        retry_seconds: float | None = None,
    ) -> None:
        self._path, self._progress, self._retry_seconds = path, progress, retry_seconds
        self._descriptor: int | None = None
        self.num_bytes = self._retry(lambda descriptor: os.fstat(descriptor).st_size)

    def read_into(self, buffers: Sequence[memoryview], begin: int) -> None:
        """Fills the buffers one after the other with the bytes of the file from `begin` on."""
        waiting, position = deque(buffers), begin
        while waiting:
            into = [waiting[index] for index in range(min(len(waiting), _BUFFERS_AT_ONCE))]
            got = self._read(into, position)
            if not got:
                raise EOFError(f"it ends at byte {position}, before what was to be read from byte {begin} on")
            position += got
            self._progress(got)
            while waiting and got >= len(waiting[0]):
                got -= len(waiting.popleft())
            if got:
                waiting[0] = waiting[0][got:]

    def read(self, num_bytes: int, begin: int) -> bytes:
        """These bytes of the file."""
        data = bytearray(num_bytes)
        self.read_into([memoryview(data)], begin)
        return bytes(data)

    def close(self) -> None:
        """Closes the file."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _read(self, into: Sequence[memoryview], position: int) -> int:
        return self._retry(lambda descriptor: os.preadv(descriptor, into, position))

    def _retry(self, read: Callable[[int], T]) -> T:
        def attempt() -> T:
            if self._descriptor is None:
                self._descriptor = self._open()
            try:
                return read(self._descriptor)
            except OSError:
                self.close()  # Its handle may be stale.
                raise

        return retry(attempt, self._path, self._progress, self._retry_seconds)

    def _open(self) -> int:
        descriptor = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "not a regular file")
        except OSError:
            os.close(descriptor)
            raise
        return descriptor
