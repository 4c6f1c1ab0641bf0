"""Large host buffers in huge pages, reused between steps.

Every step allocates the same few sizes: full buffers, flat gradients, receive buffers. The C library returns such
memory to the system when it is freed, and the system zeroes it again page by page, which takes five to nine times as
long as filling it. So new memory asks for pages of 2 MiB in place of 4 KiB (`madvise`, MADV_HUGEPAGE), and freed memory
is kept for the next buffer of the same size: two at most, so that a process holds no more than two units in addition
to those it uses.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from scale_core import compat

SMALLEST_BYTES = 1 << 20
"""Smaller buffers are left to the C library, which keeps their memory itself."""

MAX_IDLE = 2
"""As many as are gathered at once: the unit that computes and the one that is fetched ahead."""

_idle: list[torch.UntypedStorage] = []  # The last freed is last.


def empty(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a new tensor [numel], uninitialized."""
    tensor = torch.empty(0, dtype=dtype, device=device)
    if not _is_large(numel * dtype.itemsize, tensor):
        return torch.empty(numel, dtype=dtype, device=device)
    _set_memory(tensor.untyped_storage(), numel * dtype.itemsize)
    return tensor.resize_(numel)


def allocate(tensor: Tensor) -> None:
    """Gives a tensor without memory uninitialized memory; it and its views stay the same objects."""
    if _is_large(tensor.nbytes, tensor):
        _set_memory(tensor.untyped_storage(), tensor.nbytes)
    else:
        tensor.untyped_storage().resize_(tensor.nbytes)


def free(tensor: Tensor) -> None:
    """Frees the memory of a tensor; its views have none until `allocate`."""
    storage = tensor.untyped_storage()
    if not (_is_large(storage.nbytes(), tensor) and compat.can_swap_memory() and storage.resizable()):
        storage.resize_(0)
        return
    memory = torch.UntypedStorage(0, device="cpu")
    compat.swap_memory(storage, memory)
    _idle.append(memory)
    del _idle[:-MAX_IDLE]


def free_unshared(tensor: Tensor) -> None:
    """Frees a tensor that its caller drops, unless another view of it exists."""
    if compat.can_swap_memory() and tensor.untyped_storage().resizable() and compat.is_unshared(tensor):
        free(tensor)


def trim() -> None:
    """Returns all memory that is kept to the system."""
    _idle.clear()


def trim_after(owner: object) -> None:
    """Calls `trim` when `owner` is collected."""
    weakref.finalize(owner, trim).atexit = False


def _set_memory(storage: torch.UntypedStorage, num_bytes: int) -> None:
    for kept in tuple(_idle):
        if kept.nbytes() == num_bytes:
            with suppress(ValueError):  # Another thread has taken it.
                _idle.remove(kept)
                compat.swap_memory(storage, kept)
                return
    storage.resize_(num_bytes)
    if (madvise := _madvise()) is not None:
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (storage.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(start, stop - start, mmap.MADV_HUGEPAGE)  # Where it fails, pages are small.


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # As on macOS.
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _is_large(num_bytes: int, tensor: Tensor) -> bool:
    return num_bytes >= SMALLEST_BYTES and tensor.device.type == "cpu" and not compat.is_fake(tensor)
