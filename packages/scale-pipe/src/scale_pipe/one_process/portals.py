"""Where a stashed tensor is until it is popped: beside the partitions between, which never see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scale_pipe.models.skip import SkipKey
from scale_pipe.models.skip_layout import Skip


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

    def take(self, micro_batch: int, partition: int) -> dict[SkipKey, Any]:
        """Hands out what a partition will pop of a micro-batch, and holds it no longer."""
        keys = [skip.key for skip in self._layout if skip.popped_in == partition]
        return {key: self._waiting.pop((micro_batch, key)) for key in keys if (micro_batch, key) in self._waiting}
