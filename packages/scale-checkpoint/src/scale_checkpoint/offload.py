"""Saved tensors that leave the device until the backward pass comes back to them: which of them do, and which stay.

What is a parameter's or a buffer's own memory stays, and so does what is too small, or no plain tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from scale_checkpoint.lanes import lanes_of
from scale_checkpoint.phase import Aside
from scale_checkpoint.places import Target
from scale_checkpoint.store import Packed, store_for

MIN_BYTES = 1 << 16
"""Storages below this stay where they are: a copy of its own would cost more than it saves."""

_MOST_OVER_OWN = 4  # times its own bytes may a tensor's storage have: a third of a joint projection travels as a whole
_PLAIN = frozenset((Tensor, nn.Parameter, nn.Buffer))


class offload_activations(saved_tensors_hooks):  # noqa: N801  # a context manager, as torch names them
    """Inside, what autograd saves goes to the host or to a file, and comes back in the backward pass.

        >>> import torch
        >>> from scale_checkpoint import offload_activations
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 1))
        >>> with offload_activations(model):
        ...     loss = model(torch.randn(512, 64)).mean()
        >>> loss.backward()

    Args:
        *modules: Those that run inside: their parameters and buffers stay where they are.
        to: "host", pinned where that lets copies run beside the computation, or the path of a folder.
        min_bytes: Smaller storages stay.

    Raises:
        ValueError: `to` is another word, or `min_bytes` is negative.
        NotADirectoryError: There is no such folder.
    """

    def __init__(self, *modules: nn.Module, to: Target = "host", min_bytes: int = MIN_BYTES) -> None:
        if min_bytes < 0:
            raise ValueError(f"min_bytes: expected 0 or more, got {min_bytes}")
        super().__init__(packing(modules, to, min_bytes), _unpack)


def packing(modules: Sequence[nn.Module], to: Target, min_bytes: int) -> Callable[[Tensor], Tensor | Packed]:
    """Returns what packs tensors away, but for the modules' own and for those that are too small."""
    store = store_for(to)
    staying: set[int] = set()

    def pack(tensor: Tensor) -> Tensor | Packed:
        # Their own memory, looked up late: a sharded module has it only while it runs.
        if not staying and modules:
            staying.update(_storages(modules))
        if not _may_leave(tensor, min_bytes) or tensor.untyped_storage()._cdata in staying:
            with Aside():
                return tensor.detach()  # Not the tensor itself: it would hold the node that saves it.
        with Aside():
            return store.pack(tensor)

    return pack


def _unpack(packed: Tensor | Packed) -> Tensor:
    if not isinstance(packed, Packed):
        return packed
    with Aside():
        return packed.unpack()


def _storages(modules: Iterable[nn.Module]) -> set[int]:
    """The storages of all parameters and buffers."""
    found = set()
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.layout is torch.strided:
                found.add(tensor.untyped_storage()._cdata)
    return found


def _may_leave(tensor: Tensor, min_bytes: int) -> bool:
    """Whether it is a plain tensor with memory of its own, and enough of it."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return False
    if tensor.is_conj() or tensor.is_neg() or tensor.is_nested:
        return False
    # A piece of something large that stays anyhow: its storage would travel for the sake of the piece.
    num_bytes = tensor.untyped_storage().nbytes()
    return min_bytes <= num_bytes <= _MOST_OVER_OWN * tensor.numel() * tensor.itemsize


def fetched_early(sizes: Sequence[int], device: torch.device) -> int:
    """Returns how much of what left last is fetched while the backward pass is still behind it.

    Args:
        sizes: Of the storages that leave, in order, in bytes.
        device: Which they leave.
    """
    most, num_bytes = lanes_of(device)[1].ahead_bytes, 0
    for size in reversed([size for size in sizes if size >= MIN_BYTES]):
        if num_bytes and num_bytes + size > most:
            break
        num_bytes += size
    return num_bytes
