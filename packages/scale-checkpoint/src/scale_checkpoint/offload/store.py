"""What was packed away, in the order in which it left: the backward pass fetches it ahead in the reverse order.

What autograd saves is packed away as whole storages, so that several views of one tensor travel once and come back as
they were. Copies run beside the computation.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from scale_checkpoint.offload.storage import Away, Place, Target, place_for, whole_storage
from scale_checkpoint.offload.streams import Mark, lanes_of
from scale_checkpoint.saved_tensors import counter_of, have_one_counter
from scale_checkpoint.state import Aside

_IN_FLIGHT_BYTES = 1 << 30  # Beyond this the device waits until what it computes with has left.
_MOST_AHEAD = 64
_stores: dict[str, Store] = {}


def store_for(target: Target) -> Store:
    """Returns what keeps things at a place: one for all, so that what leaves from anywhere is fetched in one order.

    Raises:
        ValueError: The target is a word other than "host".
        NotADirectoryError: There is no such folder.
    """
    place = place_for(target)
    if str(target) not in _stores:
        _stores[str(target)] = Store(place)
    return _stores[str(target)]


class _Link:
    """A storage's place in the order in which they left; those that are gone are taken out of it."""

    def __init__(self, gone: Gone, before: _Link | None) -> None:
        self.gone = weakref.ref(gone)
        self.before, self.after = before, None
        if before is not None:
            before.after = self

    before: _Link | None
    after: _Link | None

    def take_out(self) -> None:
        if self.before is not None:
            self.before.after = self.after
        if self.after is not None:
            self.after.before = self.before


class Gone:
    """A storage that was packed away.

    Args:
        source: uint8 [n], on the device.
        away: Its bytes.

    Attributes:
        num_bytes: Of the storage.
        device: Where it was, and comes back to.
        views: How many packed tensors of it are still to be unpacked.
    """

    def __init__(self, source: Tensor, away: Away) -> None:
        self.num_bytes, self.device, self.views = source.numel(), source.device, 0
        self._away = away
        self._fetched: tuple[Tensor, Mark] | None = None
        self._version = 0  # Of what was fetched, as it came.
        self._is_waited_for = False

    @property
    def is_fetched(self) -> bool:
        """Whether it is back, or on its way."""
        return self._fetched is not None

    def prepare(self) -> None:
        """Starts what the host has to do before it can be fetched."""
        self._away.prepare()

    def fetch(self) -> None:
        """Starts to bring it back."""
        if self._fetched is None:
            memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            self._fetched = memory, self._away.into(memory)
            self._version = memory._version
            self._is_waited_for = False

    def take(self, alone: bool = False) -> Tensor:
        """Returns its bytes, uint8 [n], on the device, for one view.

        Args:
            alone: Nobody else gets this memory, so that it may be written to.
        """
        if self._fetched is not None and self._fetched[0]._version != self._version:
            self._fetched = None  # Who has had a view before has written into it, and this one gets it as it was.
        self.fetch()
        assert self._fetched is not None
        memory, mark = self._fetched
        mark.wait_on_device()
        is_shared = self._is_waited_for or self.views > 1
        self._is_waited_for = True
        self.drop_view()
        return memory.clone() if alone and is_shared else memory

    def drop_view(self) -> None:
        """One view less is still to be unpacked; after the last, what was fetched is the views' alone."""
        self.views -= 1
        if self.views > 0 or self._fetched is None:
            return
        if not self._is_waited_for:  # Nobody wants it any more, but the copy into its memory may still run.
            self._fetched[1].wait_on_host()
        self._fetched = None


class Packed:
    """What autograd holds in the place of a tensor.

    Args:
        store: Which has packed it.
        link: The storage's place in the order.
        gone: The storage.
        tensor: The tensor.
    """

    def __init__(self, store: Store, link: _Link, gone: Gone, tensor: Tensor) -> None:
        self._store, self._link, self._gone = store, link, gone
        self._dtype, self._size, self._stride = tensor.dtype, tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self._is_waited_for = True
        gone.views += 1

    def fetch(self) -> None:
        """Starts to bring its storage back."""
        with Aside():
            self._gone.fetch()

    def unpack(self, alone: bool = False) -> Tensor:
        """Returns the tensor, as it was when it was packed; starts to fetch what left before it.

        Args:
            alone: It shares its memory with no other tensor, so that it may be written to.
        """
        if not self._is_waited_for:  # Another backward pass over a graph that is retained.
            self._gone.views += 1
        self._is_waited_for = False
        with Aside(), torch.no_grad():
            memory = self._gone.take(alone)
            self._store.fetch_ahead(self._link)
            whole = memory[: memory.numel() // self._dtype.itemsize * self._dtype.itemsize].view(self._dtype)
            return whole.as_strided(self._size, self._stride, self._offset)

    def __del__(self) -> None:
        if self._is_waited_for:
            self._gone.drop_view()


class _Known(NamedTuple):
    """A storage that has left, as it was at one version.

    Attributes:
        owner: The storage: one that is gone may leave its number to another.
        counter: Has the version counter of the tensor that was packed, and no memory.
        link: Its place in the order.
    """

    owner: StorageWeakRef
    counter: Tensor
    link: _Link

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor of that storage and version is as it was when this one left."""
        return not self.owner.expired() and have_one_counter(tensor, self.counter)


class Store:
    """All that was packed away to one place, in the order in which it left.

    Args:
        place: Where it is kept.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._last: _Link | None = None
        # By storage and version: what was changed in place since leaves once more.
        self._known: dict[tuple[int, int], _Known] = {}
        self._in_flight: deque[tuple[Away, Tensor, Tensor, int]] = deque()
        self._in_flight_bytes = 0
        self._lock = threading.RLock()  # Graphs are let go of in the threads of the backward pass.

    def pack(self, tensor: Tensor) -> Packed:
        """Starts to move the storage of `tensor` away, unless it has left already.

        Raises:
            OSError: The disk is full, or the folder cannot be written to.
            RuntimeError: A tensor was changed in place while it left.
        """
        with self._lock:
            self._land()
            storage = tensor.untyped_storage()
            key = storage._cdata, tensor._version
            known = self._known.get(key)
            gone = None if known is None or not known.is_of(tensor) else known.link.gone()
            if known is None or gone is None:
                gone, link = self._send(tensor, key)
                return Packed(self, link, gone, tensor)
            return Packed(self, known.link, gone, tensor)

    def fetch_ahead(self, link: _Link) -> None:
        """Starts to bring back what left before a storage that is needed now, as much as may be here early."""
        with self._lock:
            self._land()
            num_bytes, before = 0, link.before
            for _ in range(_MOST_AHEAD):
                gone = None if before is None else before.gone()
                if before is None or gone is None:
                    return
                num_bytes += gone.num_bytes
                most = lanes_of(gone.device)[1].ahead_bytes
                if num_bytes > most and num_bytes > gone.num_bytes:
                    gone.prepare()
                    return
                if gone.views > 0:
                    gone.fetch()
                before = before.before

    def _send(self, tensor: Tensor, key: tuple[int, int]) -> tuple[Gone, _Link]:
        source = whole_storage(tensor)
        away = self._place.put(source)
        gone = Gone(source, away)
        self._last = link = _Link(gone, self._last)
        self._known[key] = _Known(StorageWeakRef(tensor.untyped_storage()), counter_of(tensor), link)
        weakref.finalize(gone, self._forget, key, link).atexit = False
        if not away.is_safe():
            self._in_flight.append((away, source, tensor.detach(), tensor._version))
            self._in_flight_bytes += source.numel()
        return gone, link

    def _forget(self, key: tuple[int, int], link: _Link) -> None:
        with self._lock:
            link.take_out()
            if self._last is link:
                self._last = link.before
            if key in self._known and self._known[key].link is link:
                del self._known[key]

    def _land(self) -> None:
        """Lets go of what has left by now, and makes the device wait where too much is on its way."""
        while self._in_flight:
            away, source, tensor, version = self._in_flight[0]
            if not away.is_safe():
                if self._in_flight_bytes <= _IN_FLIGHT_BYTES:
                    return
                away.wait_safe()
            self._in_flight.popleft()
            self._in_flight_bytes -= source.numel()
            if tensor._version != version:
                raise RuntimeError(
                    f"a tensor {list(tensor.shape)} that autograd has saved was changed in place while it was copied "
                    "away: do not change it in place, or keep the module that saved it out of the offload"
                )
