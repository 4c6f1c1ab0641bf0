"""Where a stashed tensor is until it is popped: beside the partitions between, which never see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from scale_core.tree import tensors_in
from scale_pipe.skip.layout import Skip
from scale_pipe.skip.namespace import SkipKey


class Portals:
    """The skips of one mini-batch, from the partition that stashes to the one that pops.

    A tensor stays on the device where it was stashed, and is copied from there straight to where it is popped.

    Args:
        layout: All that crosses from one partition to another.
    """

    def __init__(self, layout: Sequence[Skip]) -> None:
        self._layout = layout
        self._waiting: dict[tuple[int, SkipKey], Any] = {}

    def put(self, micro_batch: int, stashed: Mapping[SkipKey, Any]) -> None:
        """Takes what a partition has stashed of a micro-batch."""
        for key, value in stashed.items():
            self._waiting[micro_batch, key] = value

    def check_kept(self, micro_batch: int, given: Any) -> None:
        """Checks that what waits is not overwritten, by a layer that works in place on what it is given.

        Whether the skip changed with it would hang on devices and on checkpointing, which copy and which do not.

        Args:
            micro_batch: Its number.
            given: What the layer is given.

        Raises:
            RuntimeError: A tensor in it waits as a skip as well.
        """
        storages = set(map(_storage, tensors_in(given)))
        for (number, (_, name)), value in self._waiting.items():
            if number == micro_batch and not storages.isdisjoint(map(_storage, tensors_in(value))):
                raise RuntimeError(
                    f"{name!r} is stashed, and a layer overwrites it in place before it is popped: stash a copy, "
                    f"yield stash({name!r}, input.clone()), or give the layer inplace=False"
                )

    def take(self, micro_batch: int, partition: int) -> dict[SkipKey, Any]:
        """Hands out what a partition will pop of a micro-batch, and holds it no longer."""
        keys = [skip.key for skip in self._layout if skip.popped_in == partition]
        return {key: self._waiting.pop((micro_batch, key)) for key in keys if (micro_batch, key) in self._waiting}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)
