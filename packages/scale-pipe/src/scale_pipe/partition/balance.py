"""How many layers each partition should have: by their times, by their memory, or by the time of the whole step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from scale_pipe.microbatch import check_chunks, scatter_each
from scale_pipe.partition.block_partition import block_partition
from scale_pipe.partition.partition import check_sequential
from scale_pipe.partition.profile import StageTimes, layer_bytes, layer_times
from scale_pipe.schedules.cost_model import Costs
from scale_pipe.schedules.registry import SOLVE, schedule_for
from scale_pipe.schedules.simulation import simulate
from scale_pipe.schedules.solver.solver import solve

Device = torch.device | str | int | None

_EVALUATIONS = 1000
"""How many balances are simulated at most; a solved schedule takes a hundred times as long as a given one."""
_VISITS = 30_000


def balance_by_time(
    partitions: int, module: nn.Sequential, sample: Any, *, timeout: float = 1.0, device: Device = None
) -> list[int]:
    """Balances the times of forward and backward: the slowest partition is as quick as can be.

    Of each layer the quickest of its runs counts, by the wall clock, so that one which waits counts as well; on the CPU
    with one thread.

        >>> import torch
        >>> from scale_pipe import balance_by_time
        >>> module = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
        >>> sum(balance_by_time(2, module, torch.randn(32, 64), timeout=0.05))
        6

    Args:
        partitions: How many.
        module: The layers. They are measured as copies, one at a time, in training mode; the module is not touched.
        sample: What the first layer takes: a micro-batch, on any device.
        timeout: Seconds of wall clock to spend, after each layer has run twice; longer is steadier.
        device: Where to measure; None for where the module is.

    Returns:
        How many layers each partition has, as `Pipe` and `DistributedPipe` take it.

    Raises:
        TypeError: The module is no `nn.Sequential`, or has a forward of its own; partitions is no integer.
        ValueError: There are fewer layers than partitions, or none; a layer stands twice in the module.
    """
    _check(partitions, module)
    return block_partition([sum(times) for times in layer_times(module, sample, timeout, device)], partitions)


def balance_by_size(
    partitions: int,
    module: nn.Sequential,
    input: Any,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: Device = None,
) -> list[int]:
    """Balances memory: activations of one micro-batch, and parameters with what the optimizer keeps for them.

    Bytes are counted exactly, storage by storage, on the CPU as on any other device.

    Args:
        partitions: How many.
        module: As in `balance_by_time`.
        input: What the first layer takes: a mini-batch.
        chunks: How many micro-batches it is cut into.
        param_scale: Copies of a parameter in all: 2 with its gradient, as SGD has it; 3 with momentum; 4 with Adam.
        device: As in `balance_by_time`.

    Returns:
        How many layers each partition has.

    Raises:
        TypeError: As in `balance_by_time`.
        ValueError: As in `balance_by_time`; or chunks is not positive, or param_scale is negative.
    """
    _check(partitions, module)
    chunks = check_chunks(chunks)
    if not param_scale >= 0:
        raise ValueError(f"param_scale must not be negative, but is {param_scale}")
    sizes = layer_bytes(module, scatter_each(input, chunks, stacklevel=3)[0], device)
    return block_partition([size.activations + size.parameters * param_scale for size in sizes], partitions)


def balance_by_makespan(
    partitions: int,
    module: nn.Sequential,
    sample: Any,
    num_micro_batches: int,
    *,
    schedule: str = "1f1b",
    stages_per_rank: int | None = None,
    link: float = 0.0,
    timeout: float = 1.0,
    device: Device = None,
) -> list[int]:
    """Balances the time of a whole step, as the simulator has it for a schedule.

    Where the slowest partition stands matters, and how its time is made up of forward and gradients. So from the
    balance by times, cuts are moved as long as the simulated step becomes shorter.

    Args:
        partitions: How many stages.
        module: As in `balance_by_time`.
        sample: One micro-batch.
        num_micro_batches: Of a step.
        schedule: A name that `DistributedPipe` knows, or "solve".
        stages_per_rank: Of the schedule; None for what it is made for.
        link: Seconds of a transfer between two ranks.
        timeout: As in `balance_by_time`.
        device: As in `balance_by_time`.

    Returns:
        How many layers each partition has.

    Raises:
        TypeError: As in `balance_by_time`.
        ValueError: As in `balance_by_time`; or the schedule has another number of stages.
    """
    _check(partitions, module)
    example = schedule_for(schedule, 1, 1, stages_per_rank)
    if partitions % example.num_stages:
        raise ValueError(
            f"schedule {schedule!r} has {example.num_stages} stages on each rank, so their number is a multiple of it, "
            f"but partitions is {partitions}"
        )
    num_ranks = partitions // example.num_stages
    times = layer_times(module, sample, timeout, device)
    if schedule.lower() == SOLVE:
        return best_balance(
            times,
            partitions,
            lambda costs: solve(costs, num_ranks, num_micro_batches, visits=_VISITS).makespan,
            link,
            evaluations=_EVALUATIONS // 100,
        )
    built = schedule_for(schedule, num_ranks, num_micro_batches, stages_per_rank)
    return best_balance(times, partitions, lambda costs: simulate(built, costs).makespan, link)


def best_balance(
    times: Sequence[StageTimes],
    partitions: int,
    makespan: Callable[[Costs], float],
    link: float = 0.0,
    *,
    evaluations: int = _EVALUATIONS,
) -> list[int]:
    """Returns the balance that no move of one cut by one layer, nor of two cuts, makes quicker.

    Args:
        times: Of each layer.
        partitions: How many.
        makespan: Of the costs of stages.
        link: Of a transfer.
        evaluations: Stops after so many.
    """
    best = block_partition([sum(layer) for layer in times], partitions)
    least, spent, seen = makespan(_costs(times, best, link)), 1, {tuple(best)}
    while True:
        found = None
        for balance in _neighbours(best):
            if tuple(balance) in seen:
                continue
            if spent >= evaluations:
                return found or best
            seen.add(tuple(balance))
            spent += 1
            time = makespan(_costs(times, balance, link))
            if time < least * (1 - 1e-9):
                least, found = time, balance
        if found is None:
            return best
        best = found


def _neighbours(balance: Sequence[int]) -> list[list[int]]:
    """Returns the balances in which one layer passes from a partition to another one, all between them moving along."""
    places = range(len(balance))
    pairs = sorted(((giver, taker) for giver in places for taker in places if giver != taker), key=_distance)
    return [
        [number - (place == giver) + (place == taker) for place, number in enumerate(balance)]
        for giver, taker in pairs
        if balance[giver] > 1
    ]


def _distance(pair: tuple[int, int]) -> int:
    return abs(pair[0] - pair[1])


def _costs(times: Sequence[StageTimes], balance: Sequence[int], link: float) -> Costs:
    """Returns the costs of stages that are made of layers."""
    sums, start = [], 0
    for number in balance:
        sums.append([sum(column) for column in zip(*times[start : start + number], strict=True)])
        start += number
    forward, input_gradient, weight_gradient = zip(*sums, strict=True)
    return Costs.measured(forward, input_gradient, weight_gradient, link)


def _check(partitions: int, module: nn.Sequential) -> None:
    check_sequential(module)
    if isinstance(partitions, bool) or not isinstance(partitions, int):
        raise TypeError(f"partitions is how many there are, an integer, but is {partitions!r}")
    if not 1 <= partitions <= len(module):
        raise ValueError(
            f"each partition has at least one layer, but partitions is {partitions} and the module has {len(module)} "
            f"layers; take 1 to {len(module)}"
        )
