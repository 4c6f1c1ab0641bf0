"""Runs a mini-batch through all partitions: for each clock cycle, fetch the inputs of its tasks, and compute them.

All copies of a cycle are issued before its first computation. A copy between two accelerators waits for what its source
has been given to do by then: behind the next micro-batch's computation there it would be a cycle late.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from scale_checkpoint import checkpoint_wrapper
from scale_core.tree import map_tensors
from scale_pipe.microbatch import Arguments, copy_to
from scale_pipe.one_process.worker import Workers
from scale_pipe.partition.partition import starts_in_place
from scale_pipe.recompute import PartitionFunction, RandomState, Result
from scale_pipe.skip.layout import inspect_skip_layout
from scale_pipe.skip.namespace import SkipKey
from scale_pipe.skip.portal import Portals

# The order in which micro-batches go through partitions is GPipe's:
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
# one that was not checkpointed, whose activations are freed before those of the next one are recomputed.


class Task(NamedTuple):
    """One micro-batch in one partition."""

    micro_batch: int
    partition: int


def clock_cycles(num_micro_batches: int, num_partitions: int) -> list[list[Task]]:
    """Returns for each of M + P - 1 clock cycles the tasks that can run together, on different partitions.

    >>> [[tuple(task) for task in cycle] for cycle in clock_cycles(3, 2)]
    [[(0, 0)], [(1, 0), (0, 1)], [(2, 0), (1, 1)], [(2, 1)]]
    """
    return [
        [Task(tick - number, number) for number in range(num_partitions) if 0 <= tick - number < num_micro_batches]
        for tick in range(num_micro_batches + num_partitions - 1)
    ]


class PartitionRunner:
    """Runs a partition on its device, with skips as inputs and outputs."""

    def __init__(self, partition: nn.Module, device: torch.device) -> None:
        self.device = device
        self.starts_in_place = starts_in_place(partition)
        self._function = PartitionFunction(partition, title="partition")
        # `RandomState` replays random numbers: with a thread for each device, other threads use other generators.
        self._recomputed = checkpoint_wrapper(
            PartitionFunction(partition, title="partition", clones=self.starts_in_place), preserve_random_state=False
        )

    def fetch(self, given: Arguments, popped: Mapping[SkipKey, Any]) -> tuple[Arguments, dict[SkipKey, Any]]:
        """Copies the inputs of a micro-batch to this partition's device."""
        args, kwargs, own = copy_to(self.device, (given.args, given.kwargs, dict(popped)))
        return Arguments(args, kwargs), own

    def run(self, given: Arguments, popped: dict[SkipKey, Any], checkpoint: bool, from_batch: bool) -> Result:
        """Computes a micro-batch, with `checkpoint` so that it is recomputed in the backward pass.

        `from_batch`: its inputs may be pieces of the caller's tensors, not results of a partition.
        """
        args, kwargs = given
        if checkpoint:
            result: Result = self._recomputed(popped, args, kwargs, RandomState(self.device))
            return result
        if self.starts_in_place and from_batch:  # Pieces of one tensor share its version counter, too.
            args, kwargs = map_tensors(torch.clone, (args, kwargs))
        return self._function(popped, args, kwargs)  # type: ignore[no-any-return]  # torch types calls of modules so


R = TypeVar("R")


class Pipeline:
    """Partitions on their devices, and the workers that compute them."""

    def __init__(self, partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._runners = [PartitionRunner(part, device) for part, device in zip(partitions, devices, strict=True)]
        self._skips = inspect_skip_layout(partitions)
        self._workers = Workers(devices)

    def run(self, micro_batches: Sequence[Arguments], num_checkpointed: int) -> list[Any]:
        """Computes the outputs of all micro-batches, of which the first `num_checkpointed` are recomputed.

        Nothing of a mini-batch is kept when it returns or fails. The error of the first partition that failed is
        raised with its own traceback and a note on where.
        """
        inputs, portals = list(micro_batches), Portals(self._skips) if self._skips else None
        cut = len(micro_batches) > 1
        for cycle in clock_cycles(len(micro_batches), len(self._runners)):
            devices = [self._runners[task.partition].device for task in cycle]
            fetches = []
            for task in cycle:
                given, popped = inputs[task.micro_batch], dict[SkipKey, Any]()
                if portals is not None:
                    if self._runners[task.partition].starts_in_place:
                        portals.check_not_overwritten(task.micro_batch, given)
                    popped = portals.pop(*task)
                fetches.append(partial(self._run_task, task, self._runners[task.partition].fetch, given, popped))
            del given, popped
            fetched = self._workers.run(list(zip(devices, fetches, strict=True)))
            computations = [
                partial(
                    self._run_task,
                    task,
                    self._runners[task.partition].run,
                    given,
                    popped,
                    task.micro_batch < num_checkpointed,
                    task.partition == 0 and cut,
                )
                for task, (given, popped) in zip(cycle, fetched, strict=True)
            ]
            results: list[Result] = self._workers.run(list(zip(devices, computations, strict=True)))
            del fetches, fetched, computations  # References here would outlive the micro-batch's own use.
            for (number, _), (output, stashed) in zip(cycle, results, strict=True):
                inputs[number] = Arguments((output,), {})
                if portals is not None:
                    portals.put(number, stashed)
            del results, output, stashed
        return [arguments.args[0] for arguments in inputs]

    def _run_task(self, task: Task, function: Callable[..., R], *args: Any) -> R:
        """Calls a function for a task; its error names the task."""
        try:
            return function(*args)
        except Exception as error:
            device = self._runners[task.partition].device
            error.add_note(f"in partition {task.partition} on {device}, micro-batch {task.micro_batch}")
            raise
