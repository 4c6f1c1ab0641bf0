"""Memory of full buffers on the host, kept when they are released and given to the next ones that are gathered.

Every step gathers the same few sizes again and again. The C library returns such memory to the system when it is freed,
and the system zeroes it, page by page, when it is filled again, which takes five to nine times as long as the filling.
So a release moves the memory of a full buffer into a list, and a gather of the same size moves it back. At most two
are kept, so that a process holds no more than two units beside what it uses.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from scale_core import compat

SMALLEST_BYTES = 1 << 20
"""Smaller buffers are left to the C library, which keeps their memory itself."""

MAX_IDLE = 2
"""As many as are gathered at once: the unit that computes and the one that is fetched ahead."""

_idle: list[torch.UntypedStorage] = []  # What was released last stands last.


def fill(tensor: Tensor) -> None:
    """Gives a tensor without memory some, with any content; it and its views stay the objects that they are."""
    num_bytes, storage = tensor.numel() * tensor.itemsize, tensor.untyped_storage()
    if _is_kept(num_bytes, tensor):
        for index, other in enumerate(_idle):
            if other.nbytes() == num_bytes:
                compat.swap_memory(storage, _idle.pop(index))
                return
    storage.resize_(num_bytes)


def free(tensor: Tensor) -> None:
    """Takes the memory of a tensor away; its views see none until `fill`.

    Raises:
        RuntimeError: Something outside of torch, as an array of NumPy, shares the memory.
    """
    storage = tensor.untyped_storage()
    if not _is_kept(storage.nbytes(), tensor) or not storage.resizable():
        storage.resize_(0)
        return
    memory = torch.UntypedStorage(0, device="cpu")
    compat.swap_memory(storage, memory)
    _idle.append(memory)
    del _idle[:-MAX_IDLE]


def trim() -> None:
    """Gives back all memory that is kept."""
    _idle.clear()


def trim_after(owner: object) -> None:
    """Gives back what is kept when `owner`, whose buffers it was for, is collected."""
    weakref.finalize(owner, trim).atexit = False


def _is_kept(num_bytes: int, tensor: Tensor) -> bool:
    on_host = tensor.device.type == "cpu" and not compat.is_fake(tensor)
    return num_bytes >= SMALLEST_BYTES and on_host and compat.can_swap_memory()
