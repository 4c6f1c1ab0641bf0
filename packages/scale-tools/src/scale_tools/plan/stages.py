"""The stages of a pipeline: which ranks are run, a rank's step on its own stage, and the time of the schedule.

The ranks of a pipeline wait for each other, and a simulation has one rank. So each kind of stage runs by itself, with
inputs as if they had arrived, and gives the times of its computations on simulated streams. The schedule puts them
together: a computation begins when its rank is free and its input has arrived.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from scale_check.simulate import simulate
from scale_check.simulate.durations import durations
from scale_core.comm.mesh import ParallelDims
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.tree import map_tensors, tensors_in
from scale_moe import Experts
from scale_pipe import Costs, split
from scale_pipe.schedules.action import COMPUTES, Action, Kind
from scale_pipe.schedules.registry import get_schedule
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import peak_live
from scale_pipe.schedules.simulation import simulate as simulate_schedule
from scale_tools.plan.model import PlannedModel
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.parallelize import autocast, build, checkpoint_blocks, dims_of
from scale_tools.plan.rates import rates_of
from scale_tools.plan.strategies import Strategy
from scale_tp import parallelize
from scale_train.options import ParallelOptions
from scale_train.training.parallel.parallelize_gpt import COMPUTE_DTYPES, shard_stage

_TIMED_MICRO_BATCHES = 3
"""A step is timed with this number at most. All take the same time, except the last one, which reduces gradients."""


def schedule_of(strategy: Strategy) -> Schedule:
    """The schedule that is planned for a pipeline."""
    name = "1f1b" if strategy.stages_per_rank == 1 else "interleaved_1f1b"
    return get_schedule(name, strategy.model_ranks, strategy.chunks, strategy.stages_per_rank)


def ranks_to_simulate(planned: PlannedModel, strategy: Strategy) -> list[int]:
    """Returns the first and the last rank of a pipeline, and the one with the most blocks x live micro-batches."""
    num_ranks, blocks = strategy.model_ranks, _blocks_by_rank(planned, strategy)
    live = peak_live(schedule_of(strategy))
    fullest = max(range(num_ranks), key=lambda rank: blocks[rank] * live[rank])
    return sorted({0, fullest, num_ranks - 1})


def ranks_to_time(planned: PlannedModel, strategy: Strategy) -> list[int]:
    """Returns for each rank the first rank with an equal stage: between the ends, stages differ in blocks only."""
    last, blocks = strategy.model_ranks - 1, _blocks_by_rank(planned, strategy)
    return [
        rank if rank in (0, last) else next(other for other in range(1, last) if blocks[other] == blocks[rank])
        for rank in range(last + 1)
    ]


def _blocks_by_rank(planned: PlannedModel, strategy: Strategy) -> list[int]:
    """The number of blocks of each rank's stage; zeros where nothing says where the model is cut."""
    with torch.device("meta"):
        model: Any = planned.build().model
    cuts = planned.cuts(model, strategy.model_ranks)
    if cuts is None:
        return [0] * strategy.model_ranks
    starts = [0, *(int(name.rpartition(".")[2]) for name in cuts), len(model.blocks)]
    return [end - start for start, end in pairwise(starts)]


class BuiltStage(NamedTuple):
    """The stage of a rank."""

    stage: Any  # An nn.Module; a sharded one has `no_sync`
    inputs: tuple[Any, ...]  # Of a micro-batch: tokens and targets, or the activations of the stage before
    bytes_received: int  # In the forward of a micro-batch
    bytes_sent: int


def build_stage(
    planned: PlannedModel, strategy: Strategy, dims: ParallelDims, rank: int, options: PlanOptions
) -> BuiltStage:
    """Builds and cuts the model on the device of the context, and shards the stage."""
    model: Any = build(planned, dims).model
    cuts = planned.cuts(model, strategy.model_ranks)
    if cuts is None:
        raise ValueError(f"nothing says where {planned.title} is cut into stages: see scale_pipe.split")
    checkpoint_blocks(planned, strategy, model)
    if dims.tp > 1:
        parallelize(model, planned.tensor_plan, dims, attention_rules=planned.attention_rules)
    stages = split(model, cuts)
    micro_batch = options.batch // strategy.data_ranks // strategy.chunks
    tokens = torch.zeros(micro_batch, options.sequence, dtype=torch.int64)
    inputs: list[tuple[Any, ...]] = [(tokens, tokens)]
    with torch.no_grad():
        for stage in stages[: min(rank + 1, len(stages) - 1)]:
            inputs.append((stage(*inputs[-1]),))
    if strategy.shards_stages:
        shard_stage(stages[rank], model, dims, strategy.parallel_options(options.precision))
    received, sent = (_bytes_of(inputs[place]) if place < len(inputs) else 0 for place in (rank, rank + 1))
    return BuiltStage(stages[rank], inputs[rank], received, sent)


def _stage_input(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.is_floating_point())


def _bytes_of(passed: object) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(passed) if tensor.is_floating_point())


def averaged_bytes(stage: nn.Module, dims: ParallelDims) -> int:
    """What a rank sends where stages are whole: averages of all, and of what is not divided over the expert axis."""
    all_bytes, of_experts = (
        4 * sum(param.numel() for module in modules for param in module.parameters())
        for modules in ([stage], [module for module in stage.modules() if isinstance(module, Experts)])
    )
    sums = ((dims.size("edp"), all_bytes), (dims.ep, all_bytes - of_experts))
    return sum(2 * (size - 1) * num_bytes // size for size, num_bytes in sums)


def step_of_stage(
    built: BuiltStage,
    strategy: Strategy,
    asked: ParallelOptions,
    rank: int,
    *,
    average: Callable[[], None],
    after: Callable[[Action], None] = lambda action: None,
) -> Callable[[], None]:
    """Returns a step of a stage: forwards and backwards of micro-batches, the average of gradients, the optimizer.

    `after` is called after each computation, `average` after the last one.
    """
    stage, dtype = built.stage, COMPUTE_DTYPES.get(asked.precision)
    device = next(tensor.device.type for tensor in tensors_in(built.inputs))
    actions = schedule_of(strategy).compute_actions()[rank]
    optimizer = AdamW(stage.parameters(), lr=1e-3, fused=True)
    scaler = ShardedGradScaler(device, enabled=dtype == torch.float16)
    live: dict[int, tuple[Any, Any]] = {}

    def forward(index: int) -> None:
        inputs = map_tensors(_stage_input, built.inputs)
        with autocast(None if strategy.shards_stages else dtype, device):
            live[index] = inputs, stage(*inputs)

    def backward(index: int) -> None:
        _, output = live.pop(index)
        roots = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])

    def step() -> None:
        left = strategy.chunks  # Of the backward passes; gradients are reduced in the last one.
        for action in actions:
            if action.kind is Kind.FORWARD:
                forward(action.micro_batch)
            else:
                left -= 1
                with stage.no_sync() if strategy.shards_stages and left else nullcontext():
                    backward(action.micro_batch)
            after(action)
        average()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


class PlannedStageTimes(NamedTuple):
    """Seconds of a rank: of a micro-batch, of what it sends for one, and `after` of all that comes once in a step.

    That is the time from the last backward to the next step, plus the difference of the first and the last micro-batch
    from the others. It may be negative, because the first gradients are not added to others.
    """

    forward: float
    backward: float
    send: float
    after: float


def pipeline_seconds(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> float:
    """The time of a step: the schedule with the times of its stages."""
    # A stage is timed by itself, as if each had a rank of its own.
    number = strategy.stages_per_rank
    spread = replace(
        strategy, ranks=number * strategy.ranks, model_ranks=number * strategy.model_ranks, stages_per_rank=1
    )
    stages = ranks_to_time(planned, spread)
    by_stage = {stage: time_stage(planned, spread, options, stage) for stage in sorted(set(stages))}
    return schedule_seconds(schedule_of(strategy), [by_stage[stage] for stage in stages])


def schedule_seconds(schedule: Schedule, times: Sequence[PlannedStageTimes]) -> float:
    """The time of a step from the times of all stages; messages pass while their ranks compute.

    Here the last rank is done first, but has more to do after its last backward:

        >>> from scale_pipe.schedules.classic import one_forward_one_backward
        >>> first, last = PlannedStageTimes(1.0, 2.0, 0.0, after=1.0), PlannedStageTimes(1.0, 2.0, 0.0, after=9.0)
        >>> schedule = one_forward_one_backward(2, 2)
        >>> schedule_seconds(schedule, [first, first]), schedule_seconds(schedule, [first, last])
        (10.0, 16.0)
    """
    backwards, links = tuple(each.backward for each in times), tuple(each.send for each in times[:-1])
    costs = Costs(tuple(each.forward for each in times), backwards, (0.0,) * len(times), links)
    ends = [0.0] * schedule.num_ranks
    for span in simulate_schedule(schedule, costs).spans:
        if span.action.kind in COMPUTES:
            ends[span.rank] = max(ends[span.rank], span.end)
    after = (sum(times[stage].after for stage in stages) for stages in schedule.placement.stages_of)
    return max(map(sum, zip(ends, after, strict=True)))


def time_stage(planned: PlannedModel, strategy: Strategy, options: PlanOptions, rank: int) -> PlannedStageTimes:
    """Runs two steps of a stage on simulated streams, and times the second: units are prefetched from then on."""
    chunks = min(strategy.chunks, _TIMED_MICRO_BATCHES)
    options = replace(options, batch=options.batch // strategy.chunks * chunks)
    strategy = replace(strategy, chunks=chunks)
    asked, rates = strategy.parallel_options(options.precision), rates_of(options, strategy.ranks)
    seconds: dict[Kind, list[float]] = defaultdict(list)
    with simulate(world_size=strategy.ranks, device="sim", check=False) as simulation:
        with simulation.aside():
            dims = dims_of(asked)
        with durations(simulation, rates) as clocks:
            with simulation.device:
                built = build_stage(planned, strategy, dims, rank, options)
            reduced = 0 if strategy.shards_stages else averaged_bytes(built.stage, dims)
            end = 0.0

            def average() -> None:
                if reduced:
                    torch.cat([param.grad.view(-1) for param in built.stage.parameters() if param.grad is not None])
                    clocks.wait(clocks.send(reduced))

            def after(action: Action) -> None:
                nonlocal end
                seconds[action.kind].append(clocks.stream - end)
                end = clocks.stream

            step = step_of_stage(built, strategy, asked, rank, average=average, after=after)
            for _ in range(2):
                seconds.clear()
                clocks.host = end = clocks.now
                step()
            remaining = clocks.now - end
    send = rates.collective_seconds + built.bytes_sent / rates.network_bytes_per_second if built.bytes_sent else 0.0
    forward, backward = (statistics.median(seconds[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD))
    # Units that are gathered first, and gradients that are reduced last, come once in a step.
    once = sum(map(sum, seconds.values())) - len(seconds[Kind.FORWARD]) * (forward + backward)
    return PlannedStageTimes(forward, backward, send, remaining + once)
