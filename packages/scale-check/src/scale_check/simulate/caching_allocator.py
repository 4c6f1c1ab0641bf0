"""What torch's caching allocator reserves of a GPU for the storages of a program: more than what they take.

The allocator asks the device for segments and cuts blocks out of them. A block that was freed stays reserved, for the
stream that it was allocated on, so that streams, sizes and the order of allocations decide how much of the device a
program needs. This is the algorithm of `torch.cuda.memory` with its defaults (`c10/cuda/CUDACachingAllocator.cpp`):

- Sizes are rounded up to 512 bytes. Up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB;
  from there on a segment has the size itself, rounded up to 2 MiB.
- The smallest free block of the same stream that is large enough is taken, at the lowest address. What is left of it
  becomes a free block, but not 1 MiB or less of a large block.
- Free neighbours in a segment become one block.

Two things are left out. `record_stream` keeps a block until the other stream has caught up. And where a device is full,
segments without a block in use go back to it first, which costs time; here a device is as large as need be.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass, field

_MIB = 2**20
_ROUND = 512
_SMALL = _MIB
_SMALL_SEGMENT, _MEDIUM_SEGMENT = 2 * _MIB, 20 * _MIB
_LARGE = 10 * _MIB


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment.

    Attributes:
        address: Where it begins; segments do not touch.
        num_bytes: Its size.
        pool: The stream that may use it, and whether it is for small sizes.
        in_use: Whether a storage has it.
        previous: The part of the segment before it.
        following: The part after it.
    """

    address: int
    num_bytes: int
    pool: tuple[int, bool]
    in_use: bool = False
    previous: Block | None = field(default=None, repr=False)
    following: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """The segments of one device.

    >>> allocator = CachingAllocator()
    >>> block = allocator.allocate(3 * 2**20)  # From a segment of 20 MiB.
    >>> allocator.reserved_bytes, allocator.allocated_bytes
    (20971520, 3145728)

    Attributes:
        reserved_bytes: What all segments take now.
        peak_reserved_bytes: The most that they took, as `torch.cuda.max_memory_reserved` has it.
        allocated_bytes: What the blocks in use take now, rounded up.
    """

    def __init__(self) -> None:
        self.reserved_bytes = self.peak_reserved_bytes = self.allocated_bytes = 0
        self._free: defaultdict[tuple[int, bool], list[tuple[int, int, Block]]] = defaultdict(list)
        self._next_address = 0
        self._is_changing = False
        self._to_free: list[Block] = []

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """A block of at least so many bytes, for a stream."""
        self._is_changing = True
        block = self._allocate(num_bytes, stream)
        self._is_changing = False
        self._free_waiting()
        return block

    def free(self, block: Block) -> None:
        """Gives a block back to its stream.

        A garbage collection may end a storage in the middle of an allocation. Then its block is free after that.
        """
        assert block.in_use
        self._to_free.append(block)
        self._free_waiting()

    def empty_cache(self) -> None:
        """Gives the device all segments of which no block is in use, as `torch.cuda.empty_cache` does."""
        self._is_changing = True
        for free in self._free.values():
            for entry in [entry for entry in free if entry[2].previous is None and entry[2].following is None]:
                free.remove(entry)
                self.reserved_bytes -= entry[0]
        self._is_changing = False
        self._free_waiting()

    def _allocate(self, num_bytes: int, stream: int) -> Block:
        size = max(-(-num_bytes // _ROUND), 1) * _ROUND
        pool = (stream, size <= _SMALL)
        free = self._free[pool]
        index = bisect_left(free, (size,))
        block = free.pop(index)[2] if index < len(free) else self._new_segment(size, pool)
        left = block.num_bytes - size
        if left >= _ROUND and (pool[1] or left > _SMALL):
            rest = Block(block.address + size, left, pool, previous=block, following=block.following)
            if rest.following is not None:
                rest.following.previous = rest
            block.following, block.num_bytes = rest, size
            insort(free, (rest.num_bytes, rest.address, rest))
        block.in_use = True
        self.allocated_bytes += block.num_bytes
        return block

    def _free_waiting(self) -> None:
        while self._to_free and not self._is_changing:
            self._is_changing = True
            self._put_back(self._to_free.pop())
            self._is_changing = False

    def _put_back(self, block: Block) -> None:
        block.in_use = False
        self.allocated_bytes -= block.num_bytes
        for neighbor in (block.previous, block.following):
            if neighbor is not None and not neighbor.in_use:
                self._take(neighbor)
                block = _joined(*sorted((block, neighbor), key=lambda each: each.address))
        insort(self._free[block.pool], (block.num_bytes, block.address, block))

    def _new_segment(self, size: int, pool: tuple[int, bool]) -> Block:
        if pool[1]:
            size = _SMALL_SEGMENT
        elif size < _LARGE:
            size = _MEDIUM_SEGMENT
        else:
            size = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        block = Block(self._next_address, size, pool)
        self._next_address += size
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return block

    def _take(self, block: Block) -> None:
        free = self._free[block.pool]
        del free[bisect_left(free, (block.num_bytes, block.address))]


def _joined(first: Block, second: Block) -> Block:
    first.num_bytes += second.num_bytes
    first.following = second.following
    if second.following is not None:
        second.following.previous = first
    return first
