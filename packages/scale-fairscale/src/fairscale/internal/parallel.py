"""Tensors in equal chunks, and process groups by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from fairscale.internal.process_group import ProcessGroupName
from scale_core.comm.group import group_of


class _CachedGroups(dict[tuple[str, tuple[int, ...] | None], Any]):
    """The process groups of `get_process_group_cached`, by name and ranks."""


def chunk_and_pad(tensor: Tensor, num_chunks: int) -> list[Tensor]:
    """Returns `num_chunks` flat chunks of one size, the last ones filled with zeros.

    >>> [chunk.tolist() for chunk in chunk_and_pad(torch.arange(3), 2)]
    [[0, 1], [2, 0]]
    """
    size = -(-tensor.numel() // num_chunks)
    return (
        list(F.pad(tensor.reshape(-1), (0, size * num_chunks - tensor.numel())).split(size))
        if size
        else [tensor.reshape(-1) for _ in range(num_chunks)]
    )


def get_process_group_cached(
    name: ProcessGroupName = ProcessGroupName.default, ranks: Sequence[int] | None = None
) -> dist.ProcessGroup:
    """Returns the default group, or one of these ranks that is made once; all ranks call it together."""
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialized: call torch.distributed.init_process_group(...) first")
    if name is ProcessGroupName.default and ranks is None:
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    key = name.value, None if ranks is None else tuple(sorted(ranks))
    groups = group_of().state.get_or_create(_CachedGroups)
    if key not in groups:
        groups[key] = dist.new_group(ranks)
    group: dist.ProcessGroup = groups[key]
    return group


def validate_process_group(device: torch.device, process_group: dist.ProcessGroup) -> None:
    """Takes FairScale's check, which ranks that differ in their devices fail by themselves."""


def enable_pytorch_sync_bn(module: torch.nn.Module) -> None:
    """Takes FairScale's patch of old versions of torch, which needs none now."""


__all__ = [
    "ProcessGroupName",
    "chunk_and_pad",
    "enable_pytorch_sync_bn",
    "get_process_group_cached",
    "validate_process_group",
]
