"""Checksums of files, block by block, so that whoever reads a part verifies little more than that part.

The hash is XXH3 with 128 bits: it finds damage of any kind at the speed of memory, and does not stop somebody
who forges a file and its checksum.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

BLOCK_BYTES = 4 << 20
"""The size of a block in files that are written; for files that are read, their manifest has it."""


def checksum(*parts: bytes | memoryview) -> str:
    """The checksum of some bytes, as 32 hexadecimal digits."""
    hashed = xxhash.xxh3_128()
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


class BlockChecksums:
    """The checksums of a stream of bytes: one for each block; the last may be shorter."""

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._hashed = xxhash.xxh3_128()
        self._room = block_bytes  # in the block that is being filled
        self._full: list[str] = []

    def update(self, data: memoryview) -> None:
        """Adds bytes."""
        while len(data) >= self._room:
            self._hashed.update(data[: self._room])
            data = data[self._room :]
            self._full.append(self._hashed.hexdigest())
            self._hashed.reset()
            self._room = self.block_bytes
        self._hashed.update(data)
        self._room -= len(data)

    def digests(self) -> list[str]:
        """The checksums of all blocks so far."""
        started = self._room < self.block_bytes
        return [*self._full, *([self._hashed.hexdigest()] if started else [])]


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """How many blocks a file has."""
    return -(-num_bytes // block_bytes)


def union_of(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The numbers that are in any of these ranges `[first, last)`: sorted ranges with gaps between them.

    >>> union_of([(5, 6), (0, 2), (1, 3)])
    [(0, 3), (5, 6)]
    """
    union: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if union and first <= union[-1][1]:
            union[-1] = (union[-1][0], max(last, union[-1][1]))
        else:
            union.append((first, last))
    return union


def ranges_of(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Numbers as the ranges `[first, last)` that they form.

    >>> ranges_of([0, 1, 2, 5])
    [(0, 3), (5, 6)]
    """
    return union_of((block, block + 1) for block in blocks)
