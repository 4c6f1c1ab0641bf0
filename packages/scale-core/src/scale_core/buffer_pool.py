"""Memory on the host for large buffers, kept when they die and given to the next ones.

Every step gathers and packs into buffers of the same few sizes. The C library returns such memory to the system when it
is freed, and the system zeroes it, page by page, when it is filled again: that takes five to nine times as long as the
filling. So the blocks that they stand in stay: a block is free again when no tensor is left that reads it, whoever
holds that. At most two idle blocks are kept in all, so that a process holds no more than two units beside what it uses.
"""

from __future__ import annotations

import os
import threading
import weakref

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from scale_core import compat

SMALLEST_BYTES = 1 << 20
"""Smaller buffers are left to the C library, which keeps their memory itself."""

MAX_IDLE_BLOCKS = 2
"""As many as are gathered at once: the unit that computes and the one that is fetched ahead."""


class _Block:
    """Memory in which one buffer stands at a time."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self._storage = self.memory.untyped_storage()
        self._own_holders = compat.num_holders(self._storage)

    def is_idle(self) -> bool:
        return compat.num_holders(self._storage) == self._own_holders

    def fits(self, num_bytes: int) -> bool:
        return num_bytes <= len(self.memory) <= num_bytes + num_bytes // 8

    def storage(self, num_bytes: int) -> torch.UntypedStorage:
        """A storage over its first bytes that keeps the block in use as long as it lives."""
        part: Tensor = from_dlpack(self.memory[:num_bytes])
        return part.untyped_storage()


class BufferPool:
    """Lends memory; what has died comes back by itself."""

    def __init__(self) -> None:
        self._blocks: list[_Block] = []
        self._lock = threading.RLock()  # Garbage that is collected inside of `lend` may call `trim`.

    def lend(self, num_bytes: int) -> torch.UntypedStorage:
        """Returns memory with any content."""
        with self._lock:
            block = next((each for each in self._blocks if each.fits(num_bytes) and each.is_idle()), None)
            if block is None:
                self._give_back(keep=MAX_IDLE_BLOCKS - 1)
                block = _Block(num_bytes)
            else:
                self._blocks.remove(block)
            self._blocks.append(block)  # The one that was used last is given back last.
            return block.storage(num_bytes)

    def trim(self) -> None:
        """Gives all idle blocks back."""
        with self._lock:
            self._give_back(keep=0)

    def trim_after(self, owner: object) -> None:
        """Gives idle blocks back when `owner`, whose buffers they were, is collected."""
        weakref.finalize(owner, self.trim).atexit = False

    def settle(self) -> None:
        """Gives back what is idle beyond `MAX_IDLE_BLOCKS`."""
        with self._lock:
            self._give_back(keep=MAX_IDLE_BLOCKS)

    def after_fork(self) -> None:
        """In a child process: another thread of the parent may have held the lock."""
        self._blocks, self._lock = [], threading.RLock()

    def _give_back(self, keep: int) -> None:
        idle = [block for block in self._blocks if block.is_idle()]
        given = set(map(id, idle[: max(len(idle) - keep, 0)]))
        self._blocks = [block for block in self._blocks if id(block) not in given]


pool = BufferPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.after_fork)


def empty(numel: int, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Returns a tensor [numel] with any content, on the device of `like`; a large one on the host from the pool.

    Args:
        numel: The number of elements.
        dtype: Of the tensor.
        like: Any tensor.
    """
    num_bytes = numel * dtype.itemsize
    if not _pooled(num_bytes, like):
        return torch.empty(numel, dtype=dtype, device=like.device)
    whole = torch.empty(0, dtype=dtype, device="cpu")
    return whole.set_(pool.lend(num_bytes), 0, (numel,), (1,))


def fill(tensor: Tensor) -> None:
    """Gives a tensor without memory some, with any content; it and its views stay the objects that they are."""
    num_bytes = tensor.numel() * tensor.itemsize
    storage = tensor.untyped_storage()
    if _pooled(num_bytes, tensor) and compat.can_swap_memory():
        compat.swap_memory(storage, pool.lend(num_bytes))
    else:
        storage.resize_(num_bytes)


def free(tensor: Tensor) -> None:
    """Takes the memory of a tensor away, whether it has it from `fill` or has had it from the beginning."""
    storage = tensor.untyped_storage()
    if _pooled(storage.nbytes(), tensor) and compat.can_swap_memory():
        compat.swap_memory(storage, torch.UntypedStorage(0, device="cpu"))
        pool.settle()
    else:
        storage.resize_(0)


def _pooled(num_bytes: int, like: Tensor) -> bool:
    return num_bytes >= SMALLEST_BYTES and like.device.type == "cpu" and not compat.is_fake(like)
