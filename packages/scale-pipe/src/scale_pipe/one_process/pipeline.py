"""A mini-batch through all partitions: for each tick of the clock, fetch what it needs, and compute what it says.

All copies of a tick are issued before the first computation of it. A copy between two accelerators waits for what its
source has been given to do by then: behind the next micro-batch's computation there it would be a tick late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from scale_pipe.microbatch import Arguments
from scale_pipe.one_process.checkpoint import PartitionRun, Result
from scale_pipe.one_process.worker import Workers
from scale_pipe.skip.layout import skip_layout
from scale_pipe.skip.namespace import SkipKey
from scale_pipe.skip.portal import Portals

# In which order micro-batches go through partitions: GPipe's, as a table.
#
#     clock      partition 0   partition 1   partition 2
#       0            0
#       1            1             0
#       2            2             1             0
#       3                          2             1
#       4                                        2
#
# Backward it is the same table read from its end, and nothing drives it but autograd. Of all nodes that are ready on a
# device, autograd takes the one that was made last in its thread; and everything that a device computes forward, the
# copies to it included, is made by one thread in the order of the table. So the last micro-batch goes back first: the
# one that was not checkpointed, whose activations are gone before the next one's are computed again.


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


R = TypeVar("R")


class Pipeline:
    """Partitions on their devices, and who computes them.

    Args:
        partitions: In the order of the layers.
        devices: Of each one.
    """

    def __init__(self, partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._runs = [PartitionRun(part, device) for part, device in zip(partitions, devices, strict=True)]
        self._skips = skip_layout(partitions)
        self._workers = Workers(devices)

    def run(self, micro_batches: Sequence[Arguments], num_checkpointed: int) -> list[Any]:
        """Computes the outputs of all micro-batches; nothing of a mini-batch is left when it returns or fails.

        Args:
            micro_batches: What the first partition is called with.
            num_checkpointed: So many, the first ones, are computed again in the backward pass.

        Raises:
            Exception: What the first partition that failed has raised, with its own traceback and a note on where.
        """
        waiting, portals = list(micro_batches), Portals(self._skips)
        for cycle in clock_cycles(len(micro_batches), len(self._runs)):
            devices = [self._runs[task.partition].device for task in cycle]
            fetches = [
                partial(
                    self._told,
                    task,
                    self._runs[task.partition].fetch,
                    waiting[task.micro_batch],
                    self._popped(task, waiting[task.micro_batch], portals),
                )
                for task in cycle
            ]
            fetched = self._workers.run(list(zip(devices, fetches, strict=True)))
            computations = [
                partial(
                    self._told,
                    task,
                    self._runs[task.partition],
                    given,
                    popped,
                    task.micro_batch < num_checkpointed,
                    task.partition == 0 and len(micro_batches) > 1,
                )
                for task, (given, popped) in zip(cycle, fetched, strict=True)
            ]
            results: list[Result] = self._workers.run(list(zip(devices, computations, strict=True)))
            del fetches, fetched, computations  # What is held here would outlive the micro-batch's own use of it.
            for (number, _), (output, stashed) in zip(cycle, results, strict=True):
                waiting[number] = Arguments((output,), {})
                portals.put(number, stashed)
        return [arguments.args[0] for arguments in waiting]

    def _popped(self, task: Task, given: Arguments, portals: Portals) -> dict[SkipKey, Any]:
        if self._runs[task.partition].works_in_place:
            portals.check_kept(task.micro_batch, given)
        return portals.take(*task)

    def _told(self, task: Task, do: Callable[..., R], *args: Any) -> R:
        """Does something for a task; an error says which task it was."""
        try:
            return do(*args)
        except Exception as error:
            device = self._runs[task.partition].device
            error.add_note(f"in partition {task.partition} on {device}, micro-batch {task.micro_batch}")
            raise
