"""In which order micro-batches go through partitions: GPipe's, as a table.

    clock      partition 0   partition 1   partition 2
      0            0
      1            1             0
      2            2             1             0
      3                          2             1
      4                                        2

Backward it is the same table read from its end, and nothing drives it but autograd. Of all nodes that are ready on a
device, autograd takes the one that was made last in its thread; and everything that a device computes forward, the
copies to it included, is made by one thread in the order of the table. So the last micro-batch goes back first: the one
that was not checkpointed, whose activations are gone before the next one's are computed again.
"""

from __future__ import annotations

from typing import NamedTuple


class Task(NamedTuple):
    """What is computed at once.

    Attributes:
        micro_batch: Number of the micro-batch.
        partition: Number of the partition that it goes through.
    """

    micro_batch: int
    partition: int


def clock_cycles(num_micro_batches: int, num_partitions: int) -> list[list[Task]]:
    """Returns for each tick of the clock what can be computed at once, all of it on different partitions.

        >>> [[tuple(task) for task in cycle] for cycle in clock_cycles(3, 2)]
        [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]

    Args:
        num_micro_batches: M.
        num_partitions: P; there are M + P - 1 ticks.
    """
    return [
        [Task(tick - number, number) for number in range(num_partitions) if 0 <= tick - number < num_micro_batches]
        for tick in range(num_micro_batches + num_partitions - 1)
    ]
