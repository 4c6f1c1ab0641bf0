"""Where offloaded bytes are kept: in the memory of the host, or in a file.

A file has no name: it is there as long as somebody holds it, and is gone when nobody does, after an exception or a
`kill -9` too, and nobody ever sees half of one. Each file takes what is offloaded until it is large, then the next one
begins; a file's space is free when all that is in it was read for the last time.
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
from pathlib import Path
from typing import IO, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from scale_checkpoint.offload.streams import Lane, Mark, lanes_of

Target: TypeAlias = Literal["host"] | os.PathLike[str]
"""Where to: the memory of the host, or a folder by its path."""

_FILE_BYTES = 1 << 28
_WAITING_BYTES = 1 << 30


class Away(Protocol):
    """Bytes that have left a device."""

    def is_safe(self) -> bool:
        """Whether all has been copied, so that the source may go."""

    def wait_safe(self) -> None:
        """Lets the device go on only when the source may go."""

    def prepare(self) -> None:
        """Starts what has to be done on the host before `into` can begin."""

    def into(self, target: Tensor) -> Mark:
        """Starts to copy them into `target`, uint8 [n], on the device."""


class Place(Protocol):
    """Somewhere to keep bytes."""

    def put(self, source: Tensor) -> Away:
        """Starts to copy `source`, uint8 [n]; it must stay as it is until `is_safe`."""


class Host:
    """The memory of the host, pinned where that makes copies run beside the computation."""

    def put(self, source: Tensor) -> Away:
        out, back = lanes_of(source.device)
        return _InMemory(*out.out(source), back)


class _InMemory:
    def __init__(self, host: Tensor, arrived: Mark, back: Lane) -> None:
        self._host, self._arrived, self._back = host, arrived, back

    def is_safe(self) -> bool:
        return self._arrived.is_over()

    def wait_safe(self) -> None:
        self._arrived.wait_on_device()

    def prepare(self) -> None:
        return None

    def into(self, target: Tensor) -> Mark:
        self._arrived.wait_on_device()
        return self._back.back(self._host, target)


class Folder:
    """Files in a folder, for what the host's memory does not hold.

    Args:
        path: An existing folder, on a disk that is not memory.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: _File | None = None
        self._written: deque[tuple[Future[None], int]] = deque()
        self._waiting_bytes = 0

    def put(self, source: Tensor) -> Away:
        out, back = lanes_of(source.device)
        part = self._reserve(source.numel())
        host, arrived = out.readable(source)
        written = out.worker().submit(_write_arrived, part, host, arrived)
        self._written.append((written, source.numel()))
        self._waiting_bytes += source.numel()
        self._settle()
        return _OnDisk(part, source.numel(), arrived, written, back)

    def _settle(self) -> None:
        """Learns of what was written, a full disk among it, and waits where too much of the host's memory waits."""
        while self._written and (self._written[0][0].done() or self._waiting_bytes > _WAITING_BYTES):
            written, num_bytes = self._written.popleft()
            self._waiting_bytes -= num_bytes
            written.result()

    def _reserve(self, num_bytes: int) -> _Part:
        if self._file is None or self._file.used >= _FILE_BYTES:
            try:
                file = tempfile.TemporaryFile(dir=self.path, prefix="scale-activations-")  # noqa: SIM115  # _File closes it
                self._file = _File(file, self.path)
            except OSError as error:
                raise _told(error, self.path, num_bytes) from error
        return self._file.reserve(num_bytes)


class _File:
    """A file without a name; closed when nobody holds a part of it."""

    def __init__(self, file: IO[bytes], folder: Path) -> None:
        self._file, self.folder, self.used = file, folder, 0

    def __del__(self) -> None:
        self._file.close()

    def reserve(self, num_bytes: int) -> _Part:
        part = _Part(self, self.used)
        self.used += num_bytes
        return part

    def transfer(self, do: Callable[..., int], memory: Tensor, offset: int) -> None:
        """Reads or writes all of `memory`, uint8 [n] on the host, in as many pieces as the system makes of it."""
        view = memoryview((ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr()))
        done = 0
        while done < len(view):
            step = do(self._file.fileno(), view[done:], offset + done)
            if step <= 0:
                raise OSError(errno.EIO, "the file of offloaded activations ends too early")
            done += step


class _Part:
    """A part of a file, from `offset` on."""

    def __init__(self, file: _File, offset: int) -> None:
        self._file, self._offset = file, offset

    def write(self, memory: Tensor) -> None:
        try:
            self._file.transfer(os.pwrite, memory, self._offset)
        except OSError as error:
            raise _told(error, self._file.folder, memory.numel()) from error

    def read(self, memory: Tensor) -> None:
        self._file.transfer(lambda file, view, offset: os.preadv(file, [view], offset), memory, self._offset)


class _OnDisk:
    def __init__(self, part: _Part, num_bytes: int, arrived: Mark, written: Future[None], back: Lane) -> None:
        self._part, self._num_bytes, self._arrived, self._written, self._back = part, num_bytes, arrived, written, back
        self._read: Future[Tensor] | None = None

    def is_safe(self) -> bool:
        return self._arrived.is_over()

    def wait_safe(self) -> None:
        self._arrived.wait_on_device()

    def prepare(self) -> None:
        if self._read is None:
            self._read = self._back.worker().submit(self._read_back)

    def into(self, target: Tensor) -> Mark:
        self.prepare()
        assert self._read is not None
        memory, self._read = self._read.result(), None
        return self._back.back(memory, target)

    def _read_back(self) -> Tensor:
        self._written.result()
        memory = self._back.host_memory(self._num_bytes)
        self._part.read(memory)
        return memory


def _write_arrived(part: _Part, host: Tensor, arrived: Mark) -> None:
    arrived.wait_on_host()
    part.write(host)


def _told(error: OSError, folder: Path, num_bytes: int) -> OSError:
    """The same kind of error, with what it was about."""
    try:
        free = f"{shutil.disk_usage(folder).free / 2**20:.0f} MiB are free there"
    except OSError:
        free = "that folder cannot be read"
    return OSError(
        error.errno,
        f"offloading {num_bytes / 2**20:.1f} MiB of activations to the folder '{folder}' failed: {error.strerror}; "
        f'{free}: give a folder on a disk with more room, offload to "host", or offload fewer modules',
    )


def place_for(target: Target) -> Place:
    """Returns where bytes are kept: "host", or the path of a folder.

    Raises:
        ValueError: It is another word.
        NotADirectoryError: There is no such folder.
    """
    if target == "host":
        return Host()
    if isinstance(target, str):
        raise ValueError(
            f'offload_to: expected "host" or the path of a folder, got {target!r}: write pathlib.Path({target!r}) if '
            "that is a folder"
        )
    path = Path(target)
    if not path.is_dir():
        raise NotADirectoryError(f"offload_to: there is no folder '{path}': make it, or give another one")
    return Folder(path)


def whole_storage(tensor: Tensor) -> Tensor:
    """Returns all the bytes that a tensor's storage holds, uint8 [n], sharing them."""
    storage = tensor.detach().untyped_storage()  # An operator, so that who counts storages meets it as a tensor's own.
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
