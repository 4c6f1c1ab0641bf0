"""A model of torch's CUDA caching allocator, which reserves more of a GPU than the tensors of a program take.

The allocator asks the device for segments and splits them into blocks. A freed block stays reserved for the stream on
which it was allocated. So streams, sizes and the order of allocations decide how much memory is reserved. This is the
algorithm with its defaults (`c10/cuda/CUDACachingAllocator.cpp`):

- Sizes are rounded up to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, and below 10 MiB from segments of
  20 MiB. Above, a segment has the size of its allocation, rounded up to 2 MiB.
- An allocation takes the smallest free block of its stream that is large enough, at the lowest address. The remaining
  bytes become a free block. A large block is not split if 1 MiB or less remains.
- Free neighbors in a segment are merged.
- If a new segment would exceed the memory of the device, all segments without a block in use go back to it first. This
  costs time on a GPU, because the host waits for the device.

Not modeled: `record_stream` keeps a block until the other stream has caught up.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

_MIB = 2**20
# As in CUDACachingAllocator.cpp: kMinBlockSize, kSmallSize, kSmallBuffer, kLargeBuffer, kMinLargeAlloc, kRoundLarge.
_MIN_BLOCK_SIZE = 512
_SMALL_SIZE = _MIB
_SMALL_BUFFER, _LARGE_BUFFER = 2 * _MIB, 20 * _MIB
_MIN_LARGE_ALLOC = 10 * _MIB
_ROUND_LARGE = 2 * _MIB


@dataclass(slots=True, eq=False)
class ReservedBlock:
    """A part of a segment.

    Attributes:
        address: Where it begins; segments do not touch.
        num_bytes: Its size.
        pool: The stream that may use it, and whether it is for small sizes.
        in_use: Whether it is allocated to a storage.
        previous: The part of the segment before it.
        following: The part after it.
    """

    address: int
    num_bytes: int
    pool: tuple[int, bool]
    in_use: bool = False
    previous: ReservedBlock | None = field(default=None, repr=False)
    following: ReservedBlock | None = field(default=None, repr=False)


class CachingAllocator:
    """The segments of one device.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * 2**20)  # From a segment of 20 MiB.
    >>> allocator.reserved_bytes, allocator.allocated_bytes
    (20971520, 3145728)

    Args:
        device_memory: Bytes of the device; None for no limit. If segments in use need more, the allocator goes on, and
            `peak_reserved_bytes` is above it: a GPU would be out of memory.

    Attributes:
        reserved_bytes: The size of all segments now.
        peak_reserved_bytes: The largest size of all segments, as in `torch.cuda.max_memory_reserved`.
        allocated_bytes: The size of all blocks in use now.
        num_alloc_retries: How often the device was full, so that it freed the segments that it could.
    """

    def __init__(self, device_memory: int | None = None) -> None:
        self.device_memory = device_memory
        self.reserved_bytes = self.peak_reserved_bytes = self.allocated_bytes = self.num_alloc_retries = 0
        self._free: defaultdict[tuple[int, bool], list[tuple[int, int, ReservedBlock]]] = defaultdict(list)
        self._next_address = 0

    def allocate(self, num_bytes: int, stream: int = 0) -> ReservedBlock:
        """Returns a block of at least `num_bytes` for a stream."""
        size = max(-(-num_bytes // _MIN_BLOCK_SIZE), 1) * _MIN_BLOCK_SIZE
        pool = (stream, size <= _SMALL_SIZE)
        free = self._free[pool]
        index = bisect_left(free, (size,))
        block = free.pop(index)[2] if index < len(free) else self._new_segment(size, pool)
        num_remaining = block.num_bytes - size
        if num_remaining >= _MIN_BLOCK_SIZE and (pool[1] or num_remaining > _SMALL_SIZE):
            remaining = ReservedBlock(
                block.address + size, num_remaining, pool, previous=block, following=block.following
            )
            if remaining.following is not None:
                remaining.following.previous = remaining
            block.following, block.num_bytes = remaining, size
            insort(free, (remaining.num_bytes, remaining.address, remaining))
        block.in_use = True
        self.allocated_bytes += block.num_bytes
        return block

    def free(self, block: ReservedBlock) -> None:
        """Gives a block back to its stream."""
        assert block.in_use
        block.in_use = False
        self.allocated_bytes -= block.num_bytes
        for neighbor in (block.previous, block.following):
            if neighbor is not None and not neighbor.in_use:
                self._take(neighbor)
                block = _merged(*sorted((block, neighbor), key=lambda part: part.address))
        insort(self._free[block.pool], (block.num_bytes, block.address, block))

    def restart(self) -> None:
        """Forgets the peak and the retries so far."""
        self.peak_reserved_bytes, self.num_alloc_retries = self.reserved_bytes, 0

    def empty_cache(self) -> None:
        """Gives all segments without a block in use back to the device, as `torch.cuda.empty_cache` does."""
        for free in self._free.values():
            for entry in [entry for entry in free if entry[2].previous is None and entry[2].following is None]:
                free.remove(entry)
                self.reserved_bytes -= entry[0]

    def _new_segment(self, size: int, pool: tuple[int, bool]) -> ReservedBlock:
        if pool[1]:
            size = _SMALL_BUFFER
        elif size < _MIN_LARGE_ALLOC:
            size = _LARGE_BUFFER
        else:
            size = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if self.device_memory is not None and self.reserved_bytes + size > self.device_memory:
            self.num_alloc_retries += 1
            self.empty_cache()
        block = ReservedBlock(self._next_address, size, pool)
        self._next_address += size
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _take(self, block: ReservedBlock) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.num_bytes, block.address))]


def _merged(first: ReservedBlock, second: ReservedBlock) -> ReservedBlock:
    first.num_bytes += second.num_bytes
    first.following = second.following
    if second.following is not None:
        second.following.previous = first
    return first
