"""The lock of a run's folder, so that one program at a time trains there.

Rank 0 locks `run.lock` with `flock` for as long as it trains, and writes there who it is. The system releases such a
lock when the process ends, however it ends. Some network file systems have locks of one machine alone, or none. So the
time of the file is set every few seconds, and who finds the file of another machine looks whether that goes on.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from scale_snapshot.file_lock import Lock, try_lock
from scale_train.errors import InputError

FILE = "run.lock"

_BEAT_SECONDS = 5.0
_WATCH_SECONDS = 20.0
# A program that was killed has ranks that end some seconds later.
_PATIENCE_SECONDS = 10.0
_PAUSE_SECONDS = 0.2
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class RunLock:
    """The lock of one folder: from `take` until `release`."""

    def __init__(self) -> None:
        self._path = Path()
        self._descriptor: int | None = None
        self._is_over = threading.Event()
        self._beats: threading.Thread | None = None

    def take(self, folder: Path) -> bool:
        """Locks a folder; whether another program may have been at work there since the call began.

        Raises:
            InputError: Another program trains there; the error says where and since when.
            OSError: The file can't be written.
        """
        self._path = folder / FILE
        others, has_locks, has_waited = self._lock()
        while others and (not has_locks or others.get("machine") != _machine()):
            has_waited = True
            try:
                is_alive = self._is_touched()
            except FileNotFoundError:  # The other run has come to its end meanwhile.
                self._close()
                others, has_locks, _ = self._lock()
                continue
            if not is_alive:
                break
            self._close()
            raise _refusal(folder, others)
        os.ftruncate(self._opened, 0)
        os.pwrite(self._opened, json.dumps(_facts()).encode(), 0)
        self._beats = threading.Thread(target=self._beat, name="scale-train run lock", daemon=True)
        self._beats.start()
        return has_waited

    def release(self) -> None:
        """Removes the file and unlocks the folder; does nothing where none is locked."""
        self._is_over.set()
        if self._beats is not None:
            self._beats.join(_BEAT_SECONDS)  # A server that is gone would hold it up.
            self._beats = None
            with suppress(OSError):
                if self._is_the_file():  # Another program may have taken it over.
                    self._path.unlink()
        self._close()

    @property
    def _opened(self) -> int:
        assert self._descriptor is not None, "it is not locked"
        return self._descriptor

    def _lock(self) -> tuple[dict[str, object], bool, bool]:
        """Locks the file.

        Returns:
            What the program before has written there and not removed, whether there are locks, and whether it was
            locked at first.
        """
        give_up, has_waited = time.monotonic() + _PATIENCE_SECONDS, False
        while True:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
            locked = try_lock(self._descriptor, exclusive=True)
            others = _read(self._descriptor)
            if locked is not Lock.HELD and self._is_the_file():
                return others, locked is Lock.TAKEN, has_waited
            has_waited = True
            self._close()
            if time.monotonic() > give_up:
                raise _refusal(self._path.parent, others)
            time.sleep(_PAUSE_SECONDS)

    def _is_the_file(self) -> bool:
        """Whether the locked file has the name still: the program before removes it when it ends."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._opened))
        except FileNotFoundError:
            return False

    def _is_touched(self) -> bool:
        """Whether somebody still sets the time of the file; each look opens it again, since NFS keeps old times."""
        before, give_up = os.stat(self._path).st_mtime_ns, time.monotonic() + _WATCH_SECONDS
        while time.monotonic() < give_up:
            time.sleep(_PAUSE_SECONDS)
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if os.fstat(descriptor).st_mtime_ns != before:
                    return True
            finally:
                os.close(descriptor)
        return False

    def _beat(self) -> None:
        while not self._is_over.wait(_BEAT_SECONDS):
            with suppress(OSError):
                os.utime(self._opened)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _facts() -> dict[str, object]:
    """Who this process is, as the file says it."""
    start = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"host": socket.gethostname(), "machine": _machine(), "pid": os.getpid(), "start": start}


def _machine() -> str:
    """What no other running system is called: containers of one have several host names, and share its locks."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _read(descriptor: int) -> dict[str, object]:
    with suppress(ValueError, OSError):  # It was being written when the program ended.
        facts = json.loads(os.pread(descriptor, 4096, 0))
        if isinstance(facts, dict):
            return facts
    return {}


def _refusal(folder: Path, facts: dict[str, object]) -> InputError:
    where = f"process {facts.get('pid', '?')} on {facts.get('host', '?')}, since {facts.get('start', '?')}"
    return InputError(
        f"{folder}: a run writes there ({where}): end it first, or go on from its checkpoints in another folder, with "
        "--out"
    )
