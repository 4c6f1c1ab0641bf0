"""A copy of a state on the host, in memory that is kept for the next one.

A save in the background writes the values at the time of the call, so they are copied first: once, into
one block of memory, pinned where tensors come from a GPU. New memory costs more than the copy, so the block stays.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scale_core import compat
from scale_core.device import buffer_pool
from scale_core.device.streams import current_stream, has_streams
from scale_core.state.local_shard import LocalShard

_ALIGNMENT = 16  # bytes: the largest element

_kept: Tensor | None = None  # The block of the last copy, uint8


def copy_to_host(state: dict[str, Any]) -> dict[str, Any]:
    """Returns a flat state whose tensors are copies, valid until the next call; values are given back as they are."""
    tensors = {key: tensor for key, value in state.items() if (tensor := _elements(value)) is not None}
    block = _block(
        sum(map(_room, tensors.values())), pinned=any(has_streams(tensor.device) for tensor in tensors.values())
    )
    copies, position = dict(state), 0
    for key, tensor in tensors.items():
        host_tensor = block[position : position + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        host_tensor.copy_(tensor, non_blocking=True)
        copies[key] = _with_elements(state[key], host_tensor)
        position += _room(tensor)
    for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
        current_stream(device).synchronize()
    return copies


def kept_bytes() -> int:
    """The size of the memory that is kept for the next copy."""
    return 0 if _kept is None else _kept.nbytes


def _elements(value: Any) -> Tensor | None:
    """The part of a value that this rank may write: its tensor, unless another rank is the one that writes it."""
    if isinstance(value, LocalShard):
        return value.tensor.detach() if value.written else None
    return value.detach() if isinstance(value, Tensor) else None


def _with_elements(value: Any, copy: Tensor) -> Tensor:
    if isinstance(value, LocalShard):
        return LocalShard(copy, tuple(value.shape), value.start, value.stop, value.ranges)
    return copy


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _block(num_bytes: int, *, pinned: bool) -> Tensor:
    global _kept
    if compat.active_fake_mode() is not None:  # Of a simulation: nothing of it is kept.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned)
    if _kept is not None and (_kept.numel() < num_bytes or (pinned and not _kept.is_pinned())):
        _kept = None  # Before there is another one.
    if _kept is None:
        if pinned:
            _kept = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        else:
            _kept = buffer_pool.empty(num_bytes, torch.uint8, torch.device("cpu"))
    return _kept
