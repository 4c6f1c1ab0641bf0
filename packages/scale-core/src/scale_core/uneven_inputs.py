"""Ranks that run out of data before the others: `for batch in join(loader)`.

A rank that leaves the loop leaves the others waiting for its shards. So all ranks stay in it until the last one has no
more batches: a rank that has run out gets its last batch again, computes, and its gradients count as zero. The others
share the average among themselves, so that a step equals the step of one process on the samples that there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import exchange
from scale_core.comm.group import GroupLike, group_of

T = TypeVar("T")


@dataclass(frozen=True)
class LossShare:
    """The weight of this rank's gradients in the current step.

    Attributes:
        weight: The factor for this rank's gradients; 0 where it has run out.
        divisor: The divisor of the sum over the ranks.
    """

    weight: float
    divisor: int


active_share: LossShare | None = None  # None: every rank counts equally.
_FAILED = -1


def current_share() -> LossShare | None:
    """Returns the weight of this rank's gradients; None if every rank counts equally."""
    return active_share


class join(Generic[T]):  # noqa: N801  # it reads as a verb, `for batch in join(loader)`, as `range` and `zip` do
    """Yields batches on every rank until no rank has any more.

    All ranks must do the same with their batches: forward, backward, optimizer step. `active` tells whether the last
    yielded batch counts. Not for micro-batches under `no_sync()`: yield them together.

        >>> from scale_core import join
        >>> [batch for batch in join(["a", "b"])]
        ['a', 'b']

    Args:
        batches: This rank's batches; one at least.
        process_group: The ranks, each with its own batches; the default group if None. Ranks that share a batch, as
            in a pipeline or in tensor parallel layers, are not joined with each other.
        samples: A function that returns the number of samples of a batch. With it, ranks count by their samples. Use it
            if a last batch may be smaller, because a loss is a mean over its batch. Without it, all batches count
            equally.
        limit_seconds: The longest wait for a rank; None is the group's own limit.

    Attributes:
        active: Whether this rank's last batch counts.

    Raises:
        ValueError: A rank has no batch at all, or one of 0 samples; on every rank, when the first batch is asked for.
        RuntimeError: A rank has failed to get its next batch.
        TransferError: A rank left the loop.

    See also: [the guide to debugging](../guides/debugging.md).
    """

    @checked_arguments
    def __init__(
        self,
        batches: Iterable[T],
        process_group: GroupLike = None,
        *,
        samples: Callable[[T], int] | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self._batches = batches
        self._group = group_of(process_group, "loss")
        self._samples = samples
        self._limit_seconds = limit_seconds
        self.active = False

    def __iter__(self) -> Iterator[T]:
        global active_share
        local_batches = iter(self._batches)
        last: list[T] = []
        first = True
        try:
            while True:
                try:
                    new = list(islice(local_batches, 1))
                except Exception:
                    # The others would wait for this rank's number.
                    exchange([_FAILED, 0], self._group, limit_seconds=self._limit_seconds)
                    raise
                self.active, last = bool(new), new or last
                counts = self._counts_of_all(new)
                if not any(counts):
                    return
                if first and not all(counts):
                    ranks = ", ".join(str(rank) for rank, count in enumerate(counts) if not count)
                    raise ValueError(f"join: no batch at all on ranks {ranks} of {len(counts)}: give each at least one")
                first = False
                active_share = self._share_of(counts)
                yield last[0]
        finally:
            active_share = None

    def _counts_of_all(self, new: list[T]) -> list[int]:
        """The number of samples in each rank's next batch, by rank; 0 where it has no more."""
        count = sum(1 if self._samples is None else int(self._samples(batch)) for batch in new)
        rows = exchange([count, len(new)], self._group, limit_seconds=self._limit_seconds)
        if failed := [rank for rank, (count, _) in enumerate(rows) if count == _FAILED]:
            raise RuntimeError(
                f"join: rank {', '.join(map(str, failed))} could not get its next batch, and has raised why; all ranks "
                "leave the loop"
            )
        if any(has_rank and count < 1 for count, has_rank in rows):
            raise ValueError(f"join: expected every batch to have a sample, got {[row[0] for row in rows]}, by rank")
        return [count for count, _ in rows]

    def _share_of(self, counts: Sequence[int]) -> LossShare | None:
        local_count = counts[self._group.rank]
        if self._samples is not None:
            return LossShare(local_count / sum(counts), 1)
        active = sum(1 for count in counts if count)
        return LossShare(float(bool(local_count)), active) if active < len(counts) else None
