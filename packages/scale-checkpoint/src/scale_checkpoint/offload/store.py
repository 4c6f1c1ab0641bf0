"""Offloaded storages in the order in which they left, which the backward pass fetches ahead in reverse.

Tensors that autograd saves are moved as full storages, so that several views of one tensor are copied once and come
back as they were. Copies overlap with the computation.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from scale_checkpoint.offload.storage import StorageBackend, StoredBytes, Target, backend_for, copy_streams, storage_of
from scale_checkpoint.state import InternalOps
from scale_core.device.streams import StreamEvent

_MAX_IN_FLIGHT_BYTES = 1 << 30  # Beyond this the device waits until earlier tensors have left.
_MAX_FETCHED_AHEAD = 64  # storages
_stores: dict[str, Store] = {}


def store_for(target: Target) -> Store:
    """Returns the store of a target: one for all modules, so that all tensors are fetched in one order."""
    backend = backend_for(target)
    if str(target) not in _stores:
        _stores[str(target)] = Store(backend)
    return _stores[str(target)]


class _Link:
    """A storage's place in the order in which they left; released ones are taken out of it."""

    before: _Link | None
    after: _Link | None

    def __init__(self, storage: OffloadedStorage, before: _Link | None) -> None:
        self.storage = weakref.ref(storage)
        self.before, self.after = before, None
        if before is not None:
            before.after = self

    def remove(self) -> None:
        if self.before is not None:
            self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before


class OffloadedStorage:
    """A storage that was moved away."""

    def __init__(self, source: Tensor, stored: StoredBytes) -> None:
        self.num_bytes, self.device = source.numel(), source.device
        self.views = 0  # packed tensors of it that are still to be unpacked
        self._stored = stored
        self._fetched: tuple[Tensor, StreamEvent] | None = None
        self._version = 0  # of the fetched storage, as it came
        self._was_taken = False

    @property
    def is_fetched(self) -> bool:
        """Whether it is back, or on its way."""
        return self._fetched is not None

    def prefetch(self) -> None:
        """Starts the work of the host before it can be fetched."""
        self._stored.prefetch()

    def fetch(self) -> None:
        """Starts to bring it back."""
        if self._fetched is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            self._fetched = memory, self._stored.copy_to(memory)
            self._version = memory._version
            self._was_taken = False

    def take(self, alone: bool = False) -> Tensor:
        """Returns its bytes, uint8 [n], on the device, for one view; `alone` is memory that nobody else gets."""
        if self._fetched is not None and self._fetched[0]._version != self._version:
            self._fetched = None  # Another view was written into, and this one gets the storage as it was.
        self.fetch()
        assert self._fetched is not None
        memory, fetched = self._fetched
        copy_streams(self.device).wait(fetched)
        is_shared = self._was_taken or self.views > 1
        self._was_taken = True
        self.drop_view()
        return memory.clone() if alone and is_shared else memory

    def drop_view(self) -> None:
        """One view less is to be unpacked; after the last, the fetched memory belongs to the views only."""
        self.views -= 1
        if self.views > 0 or self._fetched is None:
            return
        if not self._was_taken:  # Nobody wants it any more, but the copy into its memory may still run.
            self._fetched[1].synchronize()
        self._fetched = None


class PackedTensor:
    """The object that autograd holds in the place of an offloaded tensor."""

    def __init__(self, store: Store, link: _Link, storage: OffloadedStorage, tensor: Tensor) -> None:
        self._store, self._link, self._storage = store, link, storage
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self._is_counted = True  # among the views of the storage
        storage.views += 1

    def fetch(self) -> None:
        """Starts to bring its storage back."""
        with InternalOps():
            self._storage.fetch()

    def unpack(self, alone: bool = False) -> Tensor:
        """Returns the tensor as it was when it was packed, and starts to fetch the storage that left before it.

        `alone`: It shares its memory with no other tensor, so that it may be written to.
        """
        if not self._is_counted:  # Another backward pass over a graph that is retained.
            self._storage.views += 1
        self._is_counted = False
        with InternalOps(), torch.no_grad():
            memory = self._storage.take(alone)
            self._store.fetch_ahead(self._link)
            typed = memory[: memory.numel() // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
            return typed.as_strided(self._size, self._stride, self._offset)

    def __del__(self) -> None:
        if self._is_counted:
            self._storage.drop_view()


def alias_of(tensor: Tensor) -> Tensor:
    """Returns the same values with the same version counter and without a history, in dispatch modes, too."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def version_counter(tensor: Tensor) -> Tensor:
    """Returns a tensor without memory that shares its version counter with `tensor`."""
    with InternalOps():
        counter = alias_of(tensor)
        counter.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return counter


def shares_version_counter(tensor: Tensor, counter: Tensor) -> bool:
    """Whether a tensor has this version counter, as its views have.

    Not so the pieces of `unsafe_chunk`, into which recurrent layers cut the gates of one storage: each counts its own
    changes in place.
    """
    before = counter._version
    with _unsafe_preserve_version_counter(tensor):
        increment_version(tensor)
        return counter._version != before


class _Known(NamedTuple):
    """A storage that has left, as it was at one version."""

    owner: StorageWeakRef  # a storage that was released may leave its number to another
    counter: Tensor  # the version counter of the tensor that was packed, without memory
    link: _Link

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor of that storage and version is as it was when this one left."""
        return not self.owner.expired() and shares_version_counter(tensor, self.counter)


class Store:
    """All that was moved to one backend, in the order in which it left."""

    def __init__(self, backend: StorageBackend) -> None:
        self._backend = backend
        self._last: _Link | None = None
        # By storage and version: a storage changed in place since then leaves once more.
        self._known: dict[tuple[int, int], _Known] = {}
        self._in_flight: deque[tuple[StoredBytes, Tensor, Tensor, int]] = deque()
        self._in_flight_bytes = 0
        self._lock = threading.RLock()  # Graphs are released in the threads of the backward pass.

    def pack(self, tensor: Tensor) -> PackedTensor:
        """Starts to move the storage of `tensor` away, unless it has left already.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
            RuntimeError: A tensor was changed in place while it was copied.
        """
        with self._lock:
            self._release_copied()
            key = tensor.untyped_storage()._cdata, tensor._version
            packed = self._known.get(key)
            storage = None if packed is None or not packed.is_of(tensor) else packed.link.storage()
            if packed is None or storage is None:
                storage, link = self._send(tensor, key)
                return PackedTensor(self, link, storage, tensor)
            return PackedTensor(self, packed.link, storage, tensor)

    def fetch_ahead(self, link: _Link) -> None:
        """Starts to bring back storages that left before one that is needed now, as much as may be fetched early."""
        with self._lock:
            self._release_copied()
            num_bytes, before = 0, link.before
            for _ in range(_MAX_FETCHED_AHEAD):
                storage = None if before is None else before.storage()
                if before is None or storage is None:
                    return
                num_bytes += storage.num_bytes
                if num_bytes > max(copy_streams(storage.device).prefetch_bytes, storage.num_bytes):
                    storage.prefetch()
                    return
                if storage.views > 0:
                    storage.fetch()
                before = before.before

    def _send(self, tensor: Tensor, key: tuple[int, int]) -> tuple[OffloadedStorage, _Link]:
        source = storage_of(tensor)
        stored = self._backend.put(source)
        storage = OffloadedStorage(source, stored)
        self._last = link = _Link(storage, self._last)
        self._known[key] = _Known(StorageWeakRef(tensor.untyped_storage()), version_counter(tensor), link)
        weakref.finalize(storage, self._forget, key, link).atexit = False
        if not stored.copied.query():
            self._in_flight.append((stored, source, tensor.detach(), tensor._version))
            self._in_flight_bytes += source.numel()
        return storage, link

    def _forget(self, key: tuple[int, int], link: _Link) -> None:
        with self._lock:
            link.remove()
            if self._last is link:
                self._last = link.before
            if key in self._known and self._known[key].link is link:
                del self._known[key]

    def _release_copied(self) -> None:
        """Releases sources that were copied by now, and makes the device wait where too much is in flight."""
        while self._in_flight:
            stored, source, tensor, version = self._in_flight[0]
            if not stored.copied.query():
                if self._in_flight_bytes <= _MAX_IN_FLIGHT_BYTES:
                    return
                copy_streams(source.device).wait(stored.copied)
            self._in_flight.popleft()
            self._in_flight_bytes -= source.numel()
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} that autograd has saved was changed in place while it was copied "
                    "away: do not change it in place, or keep the module that saved it out of the offload"
                )
