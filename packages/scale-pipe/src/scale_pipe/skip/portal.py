"""Portals: stashed tensors on their way to the partition that pops them, past the partitions between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scale_core.tree import tensors_in
from scale_pipe.skip.layout import Skip
from scale_pipe.skip.namespace import SkipKey


class Portals:
    """The skips of one mini-batch that cross from one partition to another.

    A tensor stays on the device where it was stashed, and is copied from there straight to where it is popped.
    """

    def __init__(self, layout: Sequence[Skip]) -> None:
        self._layout = layout
        self._waiting: dict[tuple[int, SkipKey], Any] = {}

    def put(self, micro_batch: int, stashed: Mapping[SkipKey, Any]) -> None:
        """Stores the skips that a partition has stashed of a micro-batch."""
        for key, value in stashed.items():
            self._waiting[micro_batch, key] = value

    def check_not_overwritten(self, micro_batch: int, given: Any) -> None:
        """Raises if the input of a layer that works in place shares memory with a skip that is still to be popped.

        Whether the skip changed with it would depend on devices and on checkpointing, because some of them copy.
        """
        storages = set(map(_storage, tensors_in(given)))
        for (number, (_, name)), value in self._waiting.items():
            if number == micro_batch and not storages.isdisjoint(map(_storage, tensors_in(value))):
                raise RuntimeError(
                    f"{name!r} is stashed, and a layer overwrites it in place before it is popped: stash a copy, "
                    f"yield stash({name!r}, input.clone()), or give the layer inplace=False"
                )

    def pop(self, micro_batch: int, partition: int) -> dict[SkipKey, Any]:
        """Returns and removes the skips that a partition will pop of a micro-batch."""
        keys = [skip.key for skip in self._layout if skip.popped_in == partition]
        return {key: self._waiting.pop((micro_batch, key)) for key in keys if (micro_batch, key) in self._waiting}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
