"""Balances: how many layers each partition has, by times, by memory, or by the time of a simulated step."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import torch
from torch import nn

from scale_core.arguments import checked_arguments
from scale_core.comm.collectives import exchange_text
from scale_core.comm.group import GroupLike, group_of
from scale_pipe.integers import check_positive
from scale_pipe.microbatch import check_chunks, scatter_each
from scale_pipe.partition.block_partition import block_partition
from scale_pipe.partition.partition import check_sequential
from scale_pipe.partition.profile import StageTimes, layer_bytes, layer_times
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.registry import SOLVE, get_schedule
from scale_pipe.schedules.simulation import simulate
from scale_pipe.schedules.solver.solver import solve

Device = torch.device | str | int | None

_MAX_BALANCES = 1000
"""How many balances are simulated at most; a solved schedule takes a hundred times as long as a given one."""
_SOLVER_VISITS = 30_000


@checked_arguments(own="partitions")
def balance_by_time(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    *,
    seconds: float = 1.0,
    device: Device = None,
    process_group: GroupLike = None,
) -> list[int]:
    """Balances the times of forward and backward: the slowest partition is as fast as can be.

    The fastest run of each layer counts, by the wall clock, so waiting counts too. On the CPU one thread runs. All
    ranks of the process group call it, and get the same balance, because the fastest run on any of them counts.

        >>> import torch
        >>> from scale_pipe import balance_by_time
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        >>> sum(balance_by_time(2, module, torch.randn(32, 64), seconds=0.05))
        6

    Args:
        partitions: The number of partitions.
        module: The layers. They are measured as copies, one at a time, in training mode; the module does not change.
        sample: One micro-batch, as the first layer takes it, on any device.
        seconds: Wall clock to spend, after each layer has run twice; more are steadier.
        device: Where to measure; None for the module's device.
        process_group: The ranks that measure together; None for all. One rank measures by itself with `Group()` of
            `scale_core`.

    Returns:
        The number of layers of each partition, as `Pipe` and `DistributedPipe` take it, the same on all ranks.

    Raises:
        TypeError: The module is not an `nn.Sequential`, or has a custom forward; or `partitions` is not an integer.
        ValueError: There are fewer layers than partitions, or none; a layer is in the module twice.

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    partitions = _check_partitions(partitions, module)
    times = _least_times(layer_times(module, sample, seconds, device), process_group)
    return block_partition([sum(layer) for layer in times], partitions)


@checked_arguments(own="partitions")
def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[int]:
    """Balances memory: activations of one micro-batch, and parameters with their gradients and optimizer state.

    Bytes are counted exactly, storage by storage, on the CPU as on any other device.

    Args:
        partitions: The number of partitions.
        module: The layers, as in `balance_by_time`.
        input: A mini-batch, as the first layer takes it.
        chunks: The number of micro-batches it is cut into.
        param_scale: Copies of a parameter in all: 2 with its gradient, as with SGD; 3 with momentum; 4 with Adam.
        device: Where to measure.

    Raises:
        TypeError: As in `balance_by_time`.
        ValueError: As in `balance_by_time`; or chunks is not positive, or param_scale is negative.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_pipe import balance_by_size
        >>> layers = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 8), nn.Linear(8, 8))
        >>> balance_by_size(2, layers, torch.randn(16, 8), chunks=4, param_scale=4.0)  # of Adam
        [1, 3]

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    partitions = _check_partitions(partitions, module)
    chunks = check_chunks(chunks)
    if not param_scale >= 0:
        raise ValueError(f"param_scale must not be negative, but is {param_scale}")
    sizes = layer_bytes(module, scatter_each(input, chunks, stacklevel=4)[0], device)
    return block_partition([size.activations + size.parameters * param_scale for size in sizes], partitions)


@checked_arguments(own="partitions")
def balance_by_makespan(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    num_micro_batches: int,
    *,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    link: float = 0.0,
    seconds: float = 1.0,
    device: Device = None,
    process_group: GroupLike = None,
) -> list[int]:
    """Balances the time of a full step of a schedule, as the simulator gives it.

    The place of the slowest partition matters, and the shares of forward and gradients in its time. So from the balance
    by times, cuts are moved as long as the simulated step becomes shorter.

    Args:
        partitions: The number of stages.
        module: The layers, as in `balance_by_time`.
        sample: One micro-batch.
        num_micro_batches: The number of micro-batches of a step.
        schedule: A name that `DistributedPipe` knows, or "solve".
        stages_per_rank: Of the schedule; None for its usual number.
        link: Seconds of a transfer between two ranks.
        seconds: Wall clock to spend.
        device: Where to measure.
        process_group: As in `balance_by_time`.

    Raises:
        TypeError: As in `balance_by_time`.
        ValueError: As in `balance_by_time`, or the schedule has a different number of stages.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from scale_pipe.partition.balance import balance_by_makespan
        >>> layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        >>> balance = balance_by_makespan(2, layers, torch.randn(4, 8), num_micro_batches=4, seconds=0.05)
        >>> len(balance), sum(balance)
        (2, 4)

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    partitions = _check_partitions(partitions, module)
    check_positive(num_micro_batches=num_micro_batches)
    example = get_schedule(schedule, 1, 1, stages_per_rank)
    if partitions % example.num_stages:
        raise ValueError(
            f"schedule {schedule!r} has {example.num_stages} stages on each rank, so their number is a multiple of it, "
            f"but partitions is {partitions}"
        )
    num_ranks = partitions // example.num_stages
    times = _least_times(layer_times(module, sample, seconds, device), process_group)
    if schedule.lower() == SOLVE:
        return best_balance(
            times,
            partitions,
            lambda costs: solve(costs, num_ranks, num_micro_batches, visits=_SOLVER_VISITS).makespan,
            link,
            max_balances=_MAX_BALANCES // 100,
        )
    built = get_schedule(schedule, num_ranks, num_micro_batches, stages_per_rank)
    return best_balance(times, partitions, lambda costs: simulate(built, costs).makespan, link)


def best_balance(
    times: Sequence[StageTimes],
    partitions: int,
    makespan: Callable[[Costs], float],
    link: float = 0.0,
    *,
    max_balances: int = _MAX_BALANCES,
) -> list[int]:
    """Returns a balance of layer times whose makespan becomes no shorter if a layer passes to another partition."""
    best = block_partition([sum(layer) for layer in times], partitions)
    least, seen = makespan(_costs(times, best, link)), {tuple(best)}
    while True:
        improved = None
        for balance in _neighbors(best):
            if tuple(balance) in seen:
                continue
            if len(seen) >= max_balances:
                return improved or best
            seen.add(tuple(balance))
            time = makespan(_costs(times, balance, link))
            if time < least * (1 - 1e-9):
                least, improved = time, balance
        if improved is None:
            return best
        best = improved


def _neighbors(balance: Sequence[int]) -> list[list[int]]:
    """Returns the balances with one layer less in one partition and one more in another, near pairs first."""
    pairs = sorted(permutations(range(len(balance)), 2), key=lambda pair: abs(pair[0] - pair[1]))
    return [
        [number - (index == source) + (index == target) for index, number in enumerate(balance)]
        for source, target in pairs
        if balance[source] > 1
    ]


def _costs(times: Sequence[StageTimes], balance: Sequence[int], link: float) -> Costs:
    """Returns the costs of stages, which are sums over their layers."""
    sums, start = [], 0
    for number in balance:
        sums.append([sum(column) for column in zip(*times[start : start + number], strict=True)])
        start += number
    forward, input_gradient, weight_gradient = zip(*sums, strict=True)
    return Costs.measured(forward, input_gradient, weight_gradient, link)


def _least_times(times: Sequence[StageTimes], process_group: GroupLike) -> list[StageTimes]:
    """Returns for each layer the least times of all ranks, whose clocks never agree; all ranks call it."""
    group = group_of(process_group)
    if group.size == 1:
        return list(times)
    times_by_rank = [json.loads(text) for text in exchange_text(json.dumps(times), group)]
    return [StageTimes(*map(min, zip(*layers, strict=True))) for layers in zip(*times_by_rank, strict=True)]


def _check_partitions(partitions: int, module: nn.Sequential) -> int:
    check_sequential(module)
    (partitions,) = check_positive(partitions=partitions)
    if partitions > len(module):
        raise ValueError(f"partitions is {partitions}, but the module has only {len(module)} layers; take fewer")
    return partitions
