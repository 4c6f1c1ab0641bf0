"""Which skips go from one partition to another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from scale_pipe import Namespace
from scale_pipe.skip.layout import Skip
from scale_pipe.skip.layout import inspect_skip_layout as _inspect_skip_layout

__all__ = ["SkipLayout", "inspect_skip_layout"]


class SkipLayout:
    """The skips between partitions.

    Args:
        skips: Those that go from one partition to another.
    """

    def __init__(self, skips: Sequence[Skip]) -> None:
        self._skips = sorted(skips, key=lambda skip: skip.stashed_in)

    def copy_policy(self, next_j: int) -> Iterator[tuple[int, Namespace | None, str]]:
        """Yields the skips that a partition pops: the partition that stashes it, its namespace, and its name."""
        return ((skip.stashed_in, *skip.key) for skip in self._skips if skip.popped_in == next_j)

    def requires_copy(self, ns: Namespace | None, name: str) -> bool:
        """Whether a skip goes from one partition to another."""
        return any(skip.key == (ns, name) for skip in self._skips)


def inspect_skip_layout(partitions: Sequence[nn.Module]) -> SkipLayout:
    """Returns the skips between partitions."""
    return SkipLayout(_inspect_skip_layout(partitions))
