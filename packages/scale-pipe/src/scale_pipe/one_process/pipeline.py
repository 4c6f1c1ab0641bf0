"""Runs a mini-batch through all partitions: for each clock cycle, fetch the inputs of its tasks, and compute them.

All copies of a cycle are issued before its first computation. A copy between two accelerators waits for the work of
its source has been given to do by then: behind the next micro-batch's computation there it would be a cycle late.

The work of an accelerator is issued by a thread of its own, so that no device waits until the host has issued work
another one does. A device that computes in the calling thread anyway has no other thread: its worker runs inline, and
the order of everything it does is always the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.profiler import record_function

from scale_checkpoint import checkpoint_wrapper
from scale_core.compat import profiler_runs
from scale_core.device.streams import InlineExecutor, worker_for
from scale_core.tree import map_tensors
from scale_pipe.microbatch import Arguments, copy_to
from scale_pipe.one_process.worker import CallerContext
from scale_pipe.partition.partition_function import PartitionFunction, Result, starts_in_place
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

R = TypeVar("R")


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
        self._recomputed = checkpoint_wrapper(
            PartitionFunction(partition, title="partition", clones=self.starts_in_place)
        )

    def fetch(self, given: Arguments, popped: dict[SkipKey, Any]) -> tuple[Arguments, dict[SkipKey, Any]]:
        """Copies the inputs of a micro-batch to this partition's device."""
        args, kwargs = given
        if not popped and not kwargs and all(isinstance(arg, Tensor) and arg.device == self.device for arg in args):
            return given, popped
        moved: tuple[Arguments, dict[SkipKey, Any]] = copy_to(self.device, (given, popped))
        return moved

    def run(self, given: Arguments, popped: Mapping[SkipKey, Any], checkpoint: bool, from_batch: bool) -> Result:
        """Computes a micro-batch, with `checkpoint` so that it is recomputed in the backward pass.

        `from_batch`: its inputs may be pieces of the caller's tensors, not results of a partition.
        """
        if checkpoint:
            return self._recomputed.run(popped, given)
        if self.starts_in_place and from_batch:  # Pieces of one tensor share its version counter, too.
            given = map_tensors(torch.clone, given)
        return self._function.run(popped, given)


class Workers:
    """One worker for each of some devices; they start with their first task, and end with this object."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = list(dict.fromkeys(devices))
        self._executors: dict[torch.device, Executor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_executors": {}}

    def run(self, tasks: Sequence[tuple[torch.device, Callable[[], R]]]) -> list[R]:
        """Runs tasks, at the same time if they are for different devices, and returns their results.

        The error of the first task in the list that failed is raised when no task runs any more.
        """
        for device, _ in tasks:
            if device not in self._executors:
                self._executors[device] = worker_for(device)
        executors = [self._executors[device] for device, _ in tasks]
        if all(isinstance(executor, InlineExecutor) for executor in executors):
            return [task() for _, task in tasks]
        context = CallerContext(self._devices)
        futures: list[Future[R]] = [
            executor.submit(context.call, device, task)
            for executor, (device, task) in zip(executors, tasks, strict=True)
        ]
        wait(futures)
        try:
            return [future.result() for future in futures]
        finally:
            futures.clear()  # An error holds this frame, and would be held by it.


class Pipeline:
    """Partitions on their devices, and the workers that compute them."""

    def __init__(self, partitions: Sequence[nn.Module], devices: Sequence[torch.device]) -> None:
        self._runners = [PartitionRunner(part, device) for part, device in zip(partitions, devices, strict=True)]
        self._skips = inspect_skip_layout(partitions)
        self._workers = Workers(devices)

    def run(self, micro_batches: Sequence[Arguments], num_checkpointed: int) -> list[Any]:
        """Computes the outputs of all micro-batches; the first `num_checkpointed` are recomputed.

        Nothing of a mini-batch is kept when it returns or fails. The error of the first partition that failed is
        raised with its own traceback and a note on where.
        """
        inputs, portals = list(micro_batches), Portals(self._skips)
        for cycle in clock_cycles(len(micro_batches), len(self._runners)):
            fetched = self._fetch(cycle, inputs, portals)
            results = self._compute(cycle, fetched, num_checkpointed, is_cut=len(micro_batches) > 1)
            for (number, _), (output, stashed) in zip(cycle, results, strict=True):
                inputs[number] = Arguments((output,), {})
                if stashed:
                    portals.put(number, stashed)
            del fetched, results, output, stashed  # References here would outlive the micro-batch's own use.
        return [arguments.args[0] for arguments in inputs]

    def _fetch(
        self, cycle: Sequence[Task], inputs: Sequence[Arguments], portals: Portals
    ) -> list[tuple[Arguments, dict[SkipKey, Any]]]:
        tasks = []
        for task in cycle:
            runner, layer_input, popped = self._runners[task.partition], inputs[task.micro_batch], dict[SkipKey, Any]()
            if self._skips:
                if runner.starts_in_place:
                    portals.check_not_overwritten(task.micro_batch, layer_input)
                popped = portals.pop(*task)
            tasks.append((runner.device, partial(self._run_task, task, runner.fetch, layer_input, popped)))
        return self._workers.run(tasks)

    def _compute(
        self,
        cycle: Sequence[Task],
        fetched: Sequence[tuple[Arguments, dict[SkipKey, Any]]],
        num_checkpointed: int,
        is_cut: bool,
    ) -> list[Result]:
        tasks = []
        for task, (layer_input, popped) in zip(cycle, fetched, strict=True):
            runner = self._runners[task.partition]
            options = task.micro_batch < num_checkpointed, is_cut and task.partition == 0
            tasks.append((runner.device, partial(self._run_task, task, runner.run, layer_input, popped, *options)))
        return self._workers.run(tasks)

    def _run_task(self, task: Task, function: Callable[..., R], *args: Any) -> R:
        """Calls a function for a task; its error names the task, and so does the trace of a profiler."""
        try:
            if not profiler_runs():
                return function(*args)
            number, partition = task
            with record_function(f"scale_pipe::{function.__name__} (partition {partition}, micro-batch {number})"):
                return function(*args)
        except Exception as error:
            device = self._runners[task.partition].device
            error.add_note(f"in partition {task.partition} on {device}, micro-batch {task.micro_batch}")
            raise
