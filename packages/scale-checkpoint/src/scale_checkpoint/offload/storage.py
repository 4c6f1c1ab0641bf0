"""Where offloaded bytes are kept: in the memory of the host, or in a file.

A file has no name: it exists as long as an open part of it does, and is gone after an exception or a `kill -9` too.
Each file takes offloaded tensors until it is large, then the next one begins; a file's space is free when all that is
in it was read for the last time.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import IO, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from scale_checkpoint.live_memory import not_counted
from scale_core.device.streams import (
    InlineExecutor,
    StreamEvent,
    copy_into,
    current_stream,
    has_streams,
    host_memory,
    stream_for,
    worker_for,
)

Target: TypeAlias = Literal["host"] | os.PathLike[str]
"""Where to: the memory of the host, or a folder by its path."""

_FILE_BYTES = 1 << 28
_MAX_UNWRITTEN_BYTES = 1 << 30
_PREFETCH_BYTES = 1 << 27


class CopyStreams:
    """Copies between a device and the host, one stream in each direction, and the threads that write and read files.

    On a CPU, the host stands for another memory, and a copy is done when the call returns.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cpu = device.type == "cpu"
        self._to_host, self._to_device = stream_for(device), stream_for(device)
        self.writer, self.reader = (InlineExecutor() if self.is_cpu else worker_for(device) for _ in range(2))
        # How much is worth fetching before it is needed, in addition to the next storage.
        self.prefetch_bytes = _PREFETCH_BYTES if has_streams(device) else 0

    def to_host(self, source: Tensor) -> tuple[Tensor, StreamEvent]:
        """Starts to copy `source`, uint8 [n], to the host; it must stay unchanged until the event."""
        with self._to_host.run():
            target = self.host_memory(source.numel())
            copy_into(target, source)
            return target, self._to_host.record()

    def readable(self, source: Tensor) -> tuple[Tensor, StreamEvent]:
        """Like `to_host`, but without a copy where the host can read `source` itself."""
        return (source, self._to_host.record()) if self.is_cpu else self.to_host(source)

    def to_device(self, source: Tensor, target: Tensor) -> StreamEvent:
        """Starts to copy `source`, uint8 [n] on the host, into `target` on the device."""
        with self._to_device.run():
            copy_into(target, source)
            return self._to_device.record()

    def wait(self, event: StreamEvent) -> None:
        """Makes the device go on only after an event."""
        event.wait(current_stream(self.device))

    def host_memory(self, num_bytes: int) -> Tensor:
        """Returns memory of the host, uint8 [num_bytes], for copies from and to the device."""
        with not_counted() if self.is_cpu else nullcontext():
            return host_memory(num_bytes, torch.uint8, self.device)


@cache
def copy_streams(device: torch.device) -> CopyStreams:
    """Returns the copy streams of a device."""
    return CopyStreams(device)


class StoredBytes(Protocol):
    """Bytes that were moved from a device."""

    copied: StreamEvent
    """After it, the source may be released."""

    def prefetch(self) -> None:
        """Starts the work of the host before `copy_to` can begin."""

    def copy_to(self, target: Tensor) -> StreamEvent:
        """Starts to copy them into `target`, uint8 [n], on the device."""


class StorageBackend(Protocol):
    """Somewhere to keep bytes."""

    def put(self, source: Tensor) -> StoredBytes:
        """Starts to copy `source`, uint8 [n]; it must stay unchanged until `copied`."""


class HostMemory:
    """The memory of the host, pinned if that makes copies overlap with the computation."""

    def put(self, source: Tensor) -> StoredBytes:
        return _InMemory(source)


class _InMemory:
    def __init__(self, source: Tensor) -> None:
        self._streams = copy_streams(source.device)
        self._host, self.copied = self._streams.to_host(source)

    def prefetch(self) -> None:
        return None

    def copy_to(self, target: Tensor) -> StreamEvent:
        self._streams.wait(self.copied)
        return self._streams.to_device(self._host, target)


class Folder:
    """Files in an existing folder, on a disk that is not memory, for tensors that the host's memory can't hold."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: _File | None = None
        self._writes: deque[tuple[Future[None], int]] = deque()
        self._unwritten_bytes = 0

    def put(self, source: Tensor) -> StoredBytes:
        if self._file is None or self._file.used >= _FILE_BYTES:
            try:
                file = tempfile.TemporaryFile(dir=self.path, prefix="scale-activations-")  # noqa: SIM115  # _File closes it
                self._file = _File(file, self.path)
            except OSError as error:
                raise _described(error, self.path, source.numel()) from error
        stored = _OnDisk(self._file, self._file.used, source)
        self._file.used += source.numel()
        self._writes.append((stored.written, source.numel()))
        self._unwritten_bytes += source.numel()
        # Raises the error of a write, for example of a full disk, and waits if too much is unwritten.
        while self._writes and (self._writes[0][0].done() or self._unwritten_bytes > _MAX_UNWRITTEN_BYTES):
            written, num_bytes = self._writes.popleft()
            self._unwritten_bytes -= num_bytes
            written.result()
        return stored


class _File:
    """A file without a name; closed when nobody holds a part of it."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file, self.folder, self.used = file, folder, 0

    def __del__(self) -> None:
        self._file.close()

    def transfer(self, do: Callable[..., int], memory: Tensor, offset: int) -> None:
        """Reads or writes all of `memory`, uint8 [n] on the host, in as many pieces as the system makes of it."""
        view = memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr()))
        done = 0
        while done < len(view):
            step = do(self._file.fileno(), view[done:], offset + done)
            if step <= 0:
                raise OSError(errno.EIO, "the file of offloaded activations ends too early")
            done += step


class _OnDisk:
    """Bytes in a part of a file, from `offset` on."""

    def __init__(self, file: _File, offset: int, source: Tensor) -> None:
        self._file, self._offset, self._num_bytes = file, offset, source.numel()
        self._streams = streams = copy_streams(source.device)
        host, self.copied = streams.readable(source)
        self.written: Future[None] = streams.writer.submit(self._write, host)
        self._read: Future[Tensor] | None = None

    def prefetch(self) -> None:
        if self._read is None:
            self._read = self._streams.reader.submit(self._read_back)

    def copy_to(self, target: Tensor) -> StreamEvent:
        self.prefetch()
        assert self._read is not None
        memory, self._read = self._read.result(), None
        return self._streams.to_device(memory, target)

    def _write(self, memory: Tensor) -> None:
        self.copied.synchronize()
        try:
            self._file.transfer(os.pwrite, memory, self._offset)
        except OSError as error:
            raise _described(error, self._file.folder, memory.numel()) from error

    def _read_back(self) -> Tensor:
        self.written.result()
        memory = self._streams.host_memory(self._num_bytes)
        self._file.transfer(lambda file, view, offset: os.preadv(file, [view], offset), memory, self._offset)
        return memory


def _described(error: OSError, folder: Path, num_bytes: int) -> OSError:
    """The same kind of error, with the folder, the size and the fix."""
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there"
    except OSError:
        free = "that folder cannot be read"
    return OSError(
        error.errno,
        f"offloading {num_bytes / 2**20:.1f} MiB of activations to the folder '{folder}' failed: {error.strerror}; "
        f'{free}: give a folder on a disk with more room, offload to "host", or offload fewer modules',
    )


def backend_for(target: Target) -> StorageBackend:
    """Returns the backend of "host" or of a folder's path; a ValueError or NotADirectoryError where it is none."""
    if target == "host":
        return HostMemory()
    if isinstance(target, str):
        raise ValueError(f'offload_to: expected "host" or a folder, got {target!r}: write pathlib.Path({target!r})')
    path = Path(target)
    if not path.is_dir():
        raise NotADirectoryError(f"offload_to: there is no folder '{path}': make it, or give another one")
    return Folder(path)


def storage_of(tensor: Tensor) -> Tensor:
    """Returns all the bytes that a tensor's storage holds, uint8 [n], sharing them."""
    storage = tensor.detach().untyped_storage()  # An operator, so that a count of storages meets it as the tensor's.
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
