"""Says which rank the others wait for, step after step, long before a wait reaches its limit.

Who is late waits for nobody: the time that each rank waits in its transfers is a measure of all the others. So each
rank adds up its waits, and once in many steps they compare: clocks of different hosts need not agree.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group, GroupLike, group_of
from scale_core.comm.work import WaitClock
from scale_core.errors import TransferError

MS_VARIABLE = "SCALE_LATE_RANKS_MS"
"""The environment variable by which data parallel techniques report late ranks: from how many milliseconds on."""

_logger = logging.getLogger(__name__)


class LateRanks:
    """Reports ranks that come later than the others, on average over many steps.

    For any loop; `fully_shard` and `ShardedDataParallel` do it by themselves where the environment variable
    `SCALE_LATE_RANKS_MS` has a number of milliseconds. The ranks compare the time that they wait on the host in
    collectives of scale; torch's own collectives are not seen, nor is waiting on an accelerator (NCCL).

        late = LateRanks(threshold_ms=50)
        for batch in batches:
            train_step(batch)
            late.step()

    Args:
        process_group: The ranks; None is the default group.
        threshold_ms: From how many milliseconds per step on a rank is late: then rank 0 of the group logs a warning.
        every: How many steps to average over; in between nothing is sent.

    Raises:
        ValueError: A number is not above 0.

    Examples:
        >>> from scale_core import LateRanks
        >>> late = LateRanks(threshold_ms=50, every=10)
        >>> for step in range(9):
        ...     _ = late.step()  # after each step: warns of ranks that come late

    See also: [the guide to debugging](../guides/debugging.md).
    """

    @checked_arguments
    def __init__(self, process_group: GroupLike = None, *, threshold_ms: float = 100.0, every: int = 50) -> None:
        if not threshold_ms > 0 or every < 1:
            raise ValueError(
                f"expected threshold_ms above 0 and every of at least 1 step, got {threshold_ms} and {every}: leave "
                "LateRanks out, or SCALE_LATE_RANKS_MS unset, where nothing is to be reported"
            )
        self.group, self.threshold_ms, self.every = group_of(process_group), threshold_ms, every
        self._num_steps = 0
        self._seconds_before = WaitClock.seconds

    def step(self) -> list[float] | None:
        """Counts a step; after every interval all ranks of the group compare.

        Returns:
            When they have compared, by how many milliseconds per step each rank came after the first one, by rank.
        """
        self._num_steps += 1
        if self._num_steps % self.every:
            return None
        waited_us = round(1e6 * (WaitClock.seconds - self._seconds_before) / self.every)
        try:
            waited_ms = [row[0] / 1000 for row in exchange([waited_us], self.group)]
        except TransferError:  # The next wait of the step says so, with all that is known.
            waited_ms = []
        self._seconds_before = WaitClock.seconds
        late = lateness_of(waited_ms)
        if self.group.rank == 0 and waited_ms:
            self._report(late, waited_ms)
        return late

    def _report(self, late_ms: Sequence[float], waited_ms: Sequence[float]) -> None:
        steps = f"on average over the last {self.every} steps"
        waits = ", ".join(f"{wait:.0f}" for wait in waited_ms)
        _logger.debug("ranks waited %s ms per step for each other, by rank, %s", waits, steps)
        for rank, late in enumerate(late_ms):
            if late >= self.threshold_ms:
                _logger.warning(
                    "rank %d of %d came %.0f ms after the others %s (step %d; ms waited per step, by rank: %s): find "
                    "out what keeps it, such as its data loading, another program, or a slower device",
                    *(rank, self.group.size, late, steps, self._num_steps, waits),
                )


def lateness_of(waited_ms: Sequence[float]) -> list[float]:
    """How much less than the one who waits longest each rank waits.

    >>> lateness_of([190.0, 195.0, 15.0])
    [5.0, 0.0, 180.0]
    """
    return [max(waited_ms) - wait for wait in waited_ms]


def late_ranks_by_environment(group: Group) -> LateRanks | None:
    """The value of `SCALE_LATE_RANKS_MS`; None if it is not set. Raises ValueError if it is not a number."""
    asked = os.environ.get(MS_VARIABLE, "")
    if not asked or group.size == 1:
        return None
    try:
        return LateRanks(group, threshold_ms=float(asked))
    except ValueError:
        raise ValueError(f"expected milliseconds above 0 in {MS_VARIABLE}, got {asked!r}: such as 50") from None
