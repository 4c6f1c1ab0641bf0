"""Memory on the host for large buffers, kept when they die and given to the next ones.

Every step gathers, packs and reduces into buffers of the same few sizes. The C library returns such memory to the
system when it is freed, and the system zeroes it, page by page, when it is filled again: that takes five to nine times
as long as the filling. So buffers are parts of blocks that stay. A block is free again when no tensor is left that
reads a part of it, whoever holds that; idle blocks beyond those that a backward pass uses at once are given back.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from scale_core import compat

SMALLEST_BYTES = 1 << 20
"""Smaller buffers are left to the C library, which keeps their memory itself."""

IDLE_BLOCKS = 8
"""How many idle blocks of one size are kept: more than a unit's backward uses, less than all gradients of a model."""

_ALIGNMENT = 64  # bytes, as of torch's own tensors
_SPARE_BYTES = 4096  # so that parts which begin at aligned places still fill a block


class _Block:
    """Memory of which buffers are parts, one after another; it begins anew when all of them have died."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._storage = self.memory.untyped_storage()
        self._own_holders = compat.num_holders(self._storage)
        self.used = 0

    def is_idle(self) -> bool:
        return compat.num_holders(self._storage) == self._own_holders

    def has_room_for(self, num_bytes: int) -> bool:
        return self.used + num_bytes <= len(self.memory)

    def part(self, num_bytes: int) -> torch.UntypedStorage:
        """The next bytes, as a storage that keeps the block in use as long as it lives."""
        start = self.used
        self.used = -(-(start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
        part: Tensor = from_dlpack(self.memory[start : start + num_bytes])
        return part.untyped_storage()


class BufferPool:
    """Lends memory; what has died comes back by itself."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._lock = threading.RLock()  # Garbage that is collected inside of `lend` may call `trim`.

    def lend(self, num_bytes: int, of: int) -> torch.UntypedStorage:
        """Returns memory with any content.

        Args:
            num_bytes: How much.
            of: The size of the blocks of which it is a part: that of a unit's full buffer.
        """
        with self._lock:
            self._take_back(IDLE_BLOCKS)
            size = of + _SPARE_BYTES
            blocks = [b for b in self._blocks if size <= len(b.memory) <= size + of // 8 and b.has_room_for(num_bytes)]
            block = max(blocks, key=lambda b: b.used, default=None)
            if block is None:
                block = _Block(size)
                self._blocks.append(block)
            return block.part(num_bytes)

    def trim(self) -> None:
        """Gives all idle blocks back."""
        with self._lock:
            self._take_back(0)

    def trim_after(self, owner: object) -> None:
        """Gives idle blocks back when `owner`, whose buffers they were, is collected."""
        weakref.finalize(owner, self.trim).atexit = False

    def _take_back(self, keep: int) -> None:
        idle: Counter[int] = Counter()
        kept = []
        for block in self._blocks:
            if block.is_idle():
                block.used = 0
                idle[len(block.memory)] += 1
            if block.used or idle[len(block.memory)] <= keep:
                kept.append(block)
        self._blocks = kept


pool = BufferPool()


def empty(numel: int, dtype: torch.dtype, like: Tensor, *, of: int | None = None) -> Tensor:
    """Returns a tensor [numel] with any content, on the device of `like`; a large one on the host from the pool.

    Args:
        numel: The number of elements.
        dtype: Of the tensor.
        like: Any tensor.
        of: The bytes of the full buffer that it is a part of; None where it is as large as that.
    """
    num_bytes = numel * dtype.itemsize
    if not _pooled(num_bytes, like):
        return torch.empty(numel, dtype=dtype, device=like.device)
    memory = pool.lend(num_bytes, max(of or 0, num_bytes))
    return torch.empty(0, dtype=dtype).set_(memory, 0, (numel,), (1,))


def fill(tensor: Tensor) -> None:
    """Gives a tensor without memory some, with any content; it and its views stay the objects that they are."""
    num_bytes = tensor.numel() * tensor.itemsize
    storage = tensor.untyped_storage()
    if _pooled(num_bytes, tensor) and compat.can_swap_memory():
        compat.swap_memory(storage, pool.lend(num_bytes, num_bytes))
    else:
        storage.resize_(num_bytes)


def free(tensor: Tensor) -> None:
    """Takes the memory of a tensor away, whether it has it from `fill` or has had it from the beginning."""
    storage = tensor.untyped_storage()
    if _pooled(storage.nbytes(), tensor) and compat.can_swap_memory():
        compat.swap_memory(storage, torch.UntypedStorage(0, device="cpu"))
    else:
        storage.resize_(0)


def _pooled(num_bytes: int, like: Tensor) -> bool:
    return num_bytes >= SMALLEST_BYTES and like.device.type == "cpu" and not compat.is_fake(like)
