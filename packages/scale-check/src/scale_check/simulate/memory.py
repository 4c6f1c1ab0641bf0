"""Memory accounting of a simulation: every live storage, its kind, and the peak.

The kind of a storage is often known only later: a tensor that a backward pass leaves behind turns out to be a gradient
when an optimizer steps. So each change of size is kept in order, with its storage, and summed by kind only when it is
read.
"""

from __future__ import annotations

import enum
import weakref
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scale_check.simulate import device_streams
from scale_check.simulate.caching_allocator import CachingAllocator, ReservedBlock


class Evidence(enum.IntEnum):
    """How sure the kind of a storage is; stronger evidence replaces weaker, and the first of equals stays."""

    PHASE = 0  # what was running when it was allocated
    MODULE = 1  # a module that was called holds it as parameter or buffer
    TRAFFIC = 2  # a collective wrote or read all of it, or it was released and filled again
    OPTIMIZER = 3  # an optimizer that stepped holds it
    LABEL = 4  # the user said so


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """One storage."""

    kind: str  # What it is for, as far as is known
    evidence: Evidence  # How well that is known
    number: int  # In the order in which storages were seen first
    made_by: str  # The operator that made it, and when, such as "aten::mm in backward"
    num_bytes: int = 0  # Its size now
    pinned: bool = False  # Of the host, and ready for asynchronous copies
    released: bool = False  # Its memory was given back while tensors still refer to it
    watch: weakref.ref[torch.UntypedStorage] | None = None  # Tells of its end
    reserved: ReservedBlock | None = None  # Its block of the device's caching allocator


class MemoryItem(NamedTuple):
    """`copies` storages of `num_bytes` each that serve the same and come from the same operator."""

    kind: str
    made_by: str
    num_bytes: int
    copies: int


class MemoryTracker:
    """Follows the sizes of all storages that it was shown, until they are freed.

    A garbage collection may end a storage between any two lines, also in the middle of a change. Then its end is booked
    after the change, here and in the allocator.

    Args:
        allocator: Allocates a block for each storage, on the current stream of the simulated device. None for the host.
    """

    def __init__(self, allocator: CachingAllocator | None = None) -> None:
        self.allocator = allocator
        self.current_bytes = 0  # What all live storages hold now
        self.peak_bytes = 0  # The most that they held at any one time since `restart()`
        self._live: dict[int, MemoryBlock] = {}  # by the identity of the storage, which is stable as long as it lives
        self._blocks: list[MemoryBlock] = []
        self._changed = array("q")  # block numbers, in the order of the changes ...
        self._deltas = array("q")  # ... and by how many bytes each grew or shrank
        self._changes_at_peak = 0
        self._is_changing = False
        self._ended: list[tuple[int, MemoryBlock]] = []  # Storages whose end is not booked yet, by their identity

    def observe(self, storage: torch.UntypedStorage, kind: str, made_by: str = "") -> MemoryBlock:
        """Adds a storage, or updates its size; `kind` is a guess from the phase."""
        block = self._live.get(id(storage))
        if block is None:
            block = MemoryBlock(kind, Evidence.PHASE, len(self._blocks), made_by)
            block.watch = weakref.ref(storage, partial(self._died, id(storage), block))
            self._live[id(storage)] = block
            self._blocks.append(block)
        num_bytes = storage.nbytes()
        if num_bytes != block.num_bytes:
            self._change(block, num_bytes)
        return block

    def resized(self, storage: torch.UntypedStorage, bytes_before: int, kind: str) -> None:
        """Updates a storage after `UntypedStorage.resize_`: the release and refill of a gathered buffer."""
        block = self.observe(storage, kind)
        if block.num_bytes:
            block.released = False
            if not bytes_before:
                _claim(block, "gathered", Evidence.TRAFFIC)
        elif bytes_before:
            block.released = True

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Whether the storage is tracked."""
        return id(storage) in self._live

    def claim(self, storage: torch.UntypedStorage, kind: str, evidence: Evidence) -> None:
        """Sets the kind of a storage, also for the past."""
        _claim(self.observe(storage, kind), kind, evidence)

    def current_by_kind(self) -> dict[str, int]:
        """The current bytes by kind, largest first."""
        return self._by_kind(len(self._deltas))

    def peak_by_kind(self) -> dict[str, int]:
        """The bytes at the peak by kind, largest first; they add up to `peak_bytes`."""
        return self._by_kind(self._changes_at_peak)

    def largest_at_peak(self) -> list[MemoryItem]:
        """The storages at the peak, equal ones counted together, largest in sum first."""
        sizes: Counter[int] = Counter()
        for number, delta in self._until(self._changes_at_peak):
            sizes[number] += delta
        alike = Counter(
            (self._blocks[number].kind, self._blocks[number].made_by, size) for number, size in sizes.items() if size
        )
        items = [MemoryItem(kind, made_by, size, copies) for (kind, made_by, size), copies in alike.items()]
        return sorted(items, key=lambda item: -item.copies * item.num_bytes)

    def restart(self) -> None:
        """Forgets the past: the current bytes are the first peak. The allocator keeps its segments."""
        with self._changing():
            if self.allocator is not None:
                self.allocator.restart()
            self._blocks = list(self._live.values())
            self._changed, self._deltas = array("q"), array("q")
            for number, block in enumerate(self._blocks):
                block.number = number
                self._changed.append(number)
                self._deltas.append(block.num_bytes)
            self.peak_bytes = self.current_bytes
            self._changes_at_peak = len(self._deltas)

    def empty_cache(self) -> None:
        """Makes the allocator give back segments that no storage uses."""
        if self.allocator is not None:
            with self._changing():
                self.allocator.empty_cache()

    def compact(self) -> None:
        """Makes the allocator give all live storages new blocks, as if nothing else had been allocated before."""
        if self.allocator is not None:
            with self._changing():
                streams: dict[MemoryBlock, int] = {}
                for block in self._live.values():
                    if block.reserved is not None:
                        streams[block] = block.reserved.pool[0]
                        self.allocator.free(block.reserved)
                self.allocator.empty_cache()
                for block, stream in streams.items():
                    block.reserved = self.allocator.allocate(block.num_bytes, stream)

    def close(self) -> None:
        """Stops tracking."""
        for block in self._blocks:
            block.watch = None
        self._live.clear()

    def _by_kind(self, changes: int) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for number, delta in self._until(changes):
            totals[self._blocks[number].kind] += delta
        return {kind: total for kind, total in totals.most_common() if total}

    def _until(self, changes: int) -> Iterator[tuple[int, int]]:
        return zip(self._changed[:changes], self._deltas[:changes], strict=True)

    def _died(self, key: int, block: MemoryBlock, _: weakref.ref[torch.UntypedStorage]) -> None:
        self._ended.append((key, block))
        self._book_ended()

    def _change(self, block: MemoryBlock, num_bytes: int) -> None:
        with self._changing():
            self._book(block, num_bytes)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Inside, no end of a storage is booked; those that come meanwhile are booked afterwards."""
        self._is_changing = True
        try:
            yield
        finally:
            self._is_changing = False
        self._book_ended()

    def _book_ended(self) -> None:
        while self._ended and not self._is_changing:
            self._is_changing = True
            ended, self._ended = self._ended, []
            for key, block in ended:
                del self._live[key]
                self._book(block, 0)
            self._is_changing = False

    def _book(self, block: MemoryBlock, num_bytes: int) -> None:
        delta = num_bytes - block.num_bytes
        block.num_bytes = num_bytes
        if self.allocator is not None:
            old_block, stream = block.reserved, device_streams.current_stream().stream_id
            block.reserved = self.allocator.allocate(num_bytes, stream) if num_bytes else None
            if old_block is not None:  # torch copies a storage that changes its size before it frees the old memory.
                self.allocator.free(old_block)
        self._changed.append(block.number)
        self._deltas.append(delta)
        self.current_bytes += delta
        if self.current_bytes > self.peak_bytes:
            self.peak_bytes = self.current_bytes
            self._changes_at_peak = len(self._deltas)


class Memory:
    """One memory of a simulation, such as the host's: its current and its peak content."""

    def __init__(self, tracker: MemoryTracker, learn: Callable[[], None]) -> None:
        self._tracker, self._learn = tracker, learn

    @property
    def current_bytes(self) -> int:
        """The current bytes."""
        return self._tracker.current_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes at any one time."""
        return self._tracker.peak_bytes

    @property
    def current_by_kind(self) -> dict[str, int]:
        """The current bytes by kind, largest first."""
        self._learn()
        return self._tracker.current_by_kind()

    @property
    def peak_by_kind(self) -> dict[str, int]:
        """The bytes at the peak by kind, largest first; they add up to `peak_bytes`."""
        self._learn()
        return self._tracker.peak_by_kind()

    @property
    def largest_at_peak(self) -> list[MemoryItem]:
        """The storages at the peak: where to look when a peak is too high."""
        self._learn()
        return self._tracker.largest_at_peak()


def _claim(block: MemoryBlock, kind: str, evidence: Evidence) -> None:
    if evidence > block.evidence:
        block.kind, block.evidence = kind, evidence


def tensors_with_memory(argument: Any) -> Iterator[Tensor]:
    """The tensors with memory in an operator's arguments or results, which nest lists at most."""
    if isinstance(argument, Tensor):
        if argument.device.type != "meta":
            yield argument
    elif isinstance(argument, list | tuple):
        for entry in argument:
            yield from tensors_with_memory(entry)
