"""The stages of a pipeline: which ranks are run, a rank's step on its own stage, and the time of the schedule.

The ranks of a pipeline wait for each other, and a simulation has one rank. So each kind of stage runs by itself, with
inputs as if they had arrived. One run gives its memory and, on simulated streams, the times of its computations. What
ranks exchange is added up from the shapes. The schedule puts the times together: a computation begins when its rank is
free and its input has arrived.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from scale_core.comm.mesh import ParallelDims
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.tree import map_tensors, tensors_in
from scale_moe import Experts
from scale_pipe import Costs, split
from scale_pipe.schedules.action import COMPUTES, Kind
from scale_pipe.schedules.registry import get_schedule
from scale_pipe.schedules.schedule import Schedule
from scale_pipe.schedules.simulation import peak_live
from scale_pipe.schedules.simulation import simulate as simulate_schedule
from scale_tools.plan.model import PlannedModel
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.parallelize import autocast, build, checkpoint_blocks
from scale_tools.plan.simulated_rank import Estimate, simulated_rank
from scale_tools.plan.strategies import Strategy
from scale_tp import parallelize
from scale_train.training.parallel.parallelize_gpt import COMPUTE_DTYPES, shard_stage

_FEW_MICRO_BATCHES = 3
"""At most this number in a step that only gives times, and in the step before the one that counts. All take the same
time, except the last one, which reduces gradients."""


def estimate_pipeline(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> Estimate:
    """The memory of the rank that needs most, the most bytes that one sends, and the time of the schedule."""
    ranks = ranks_to_simulate(planned, strategy)
    stages = simulate_stages(planned, strategy, options, ranks)
    estimates = [stages[rank].estimate for rank in ranks]
    return replace(
        max(estimates, key=lambda estimate: estimate.peak_bytes),
        bytes_sent=max((estimate.bytes_sent for estimate in estimates), key=lambda sent: sum(sent.values())),
        reserved_bytes=max(estimate.reserved_bytes or 0 for estimate in estimates),
        num_alloc_retries=max(estimate.num_alloc_retries for estimate in estimates),
        seconds=schedule_seconds(schedule_of(strategy), [stage.times for stage in stages]),
    )


def pipeline_seconds(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> float:
    """The time of a step only, also of a schedule that has several stages on a rank."""
    stages = simulate_stages(planned, strategy, options)
    return schedule_seconds(schedule_of(strategy), [stage.times for stage in stages])


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
    options: PlanOptions,
    rank: int,
    *,
    average: Callable[[], None],
    after: Callable[[Kind], None],
) -> Callable[[int], None]:
    """Returns a step of a stage: forwards and backwards of micro-batches, the average of gradients, the optimizer.

    It is called with the number of micro-batches. `after` is called after each computation, `average` after the last.
    """
    stage, dtype = built.stage, COMPUTE_DTYPES.get(options.precision)
    device = next(tensor.device.type for tensor in tensors_in(built.inputs))
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

    def step(num_micro_batches: int) -> None:
        left = num_micro_batches  # Of the backward passes; gradients are reduced in the last one.
        for action in schedule_of(replace(strategy, chunks=num_micro_batches)).compute_actions()[rank]:
            if action.kind is Kind.FORWARD:
                forward(action.micro_batch)
            else:
                left -= 1
                with stage.no_sync() if strategy.shards_stages and left else nullcontext():
                    backward(action.micro_batch)
            after(action.kind)
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


class SimulatedStage(NamedTuple):
    """What a rank needs for its stage, and the times from which the schedule makes the time of a step."""

    estimate: Estimate
    times: PlannedStageTimes


def simulate_stages(
    planned: PlannedModel, strategy: Strategy, options: PlanOptions, ranks: Collection[int] = ()
) -> list[SimulatedStage]:
    """Returns all stages, of which equal ones run once: on these ranks with all micro-batches, on others with few."""
    # A stage is run by itself, as if each had a rank of its own.
    per_rank = strategy.stages_per_rank
    spread = replace(
        strategy, ranks=per_rank * strategy.ranks, model_ranks=per_rank * strategy.model_ranks, stages_per_rank=1
    )
    stages = ranks_to_time(planned, spread)
    num_micro_batches = {rank: min(strategy.chunks, _FEW_MICRO_BATCHES) for rank in sorted(set(stages))}
    num_micro_batches |= dict.fromkeys(ranks, strategy.chunks)
    by_rank = {
        rank: simulate_stage(planned, spread, options, rank, number) for rank, number in num_micro_batches.items()
    }
    return [by_rank[rank] for rank in stages]


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


def simulate_stage(
    planned: PlannedModel, strategy: Strategy, options: PlanOptions, rank: int, num_micro_batches: int
) -> SimulatedStage:
    """Runs a step of few micro-batches, in which AdamW makes its state, and the step that counts."""
    with simulated_rank(strategy, options) as simulated:
        simulation, dims, clocks = simulated
        assert clocks is not None
        with simulation.device:
            built = build_stage(planned, strategy, dims, rank, options)
        params = list(built.stage.parameters())
        # Pipelines beside each other average whole stages by DistributedDataParallel, which keeps buckets as well.
        has_buckets = dims.size("edp") > 1 and not strategy.shards_stages
        buckets = [torch.zeros_like(param) for param in params] if has_buckets else []
        for bucket in buckets:
            simulation.label(bucket, "reduction")
        reduced = 0 if strategy.shards_stages else averaged_bytes(built.stage, dims)
        ends: list[tuple[Kind, float]] = []

        def average() -> None:
            if has_buckets:  # The message that has the gradients of all parameters.
                torch.cat([param.grad.view(-1) for param in params if param.grad is not None])
            if reduced:
                clocks.wait(clocks.send(reduced))

        step = step_of_stage(
            built, strategy, options, rank, average=average, after=lambda kind: ends.append((kind, clocks.stream))
        )
        warmup = partial(step, min(num_micro_batches, _FEW_MICRO_BATCHES))
        estimate = simulated.estimate(strategy, [warmup, partial(step, num_micro_batches)])
        assert estimate.seconds is not None
        begin, ends = clocks.now - estimate.seconds, ends[-2 * num_micro_batches :]
    sent = {"send": strategy.chunks * (built.bytes_received + built.bytes_sent), **estimate.bytes_sent}
    if reduced:
        sent["all_reduce"] = sent.get("all_reduce", 0) + reduced
    seconds: dict[Kind, list[float]] = defaultdict(list)
    for (_, start), (kind, end) in pairwise([(Kind.FORWARD, begin), *ends]):
        seconds[kind].append(end - start)
    forward, backward = (statistics.median(seconds[kind]) for kind in (Kind.FORWARD, Kind.BACKWARD))
    rates = clocks.rates
    send = rates.collective_seconds + built.bytes_sent / rates.network_bytes_per_second if built.bytes_sent else 0.0
    # Units that are gathered first, and gradients that are reduced last, come once in a step.
    once = estimate.seconds - num_micro_batches * (forward + backward)
    return SimulatedStage(replace(estimate, bytes_sent=sent), PlannedStageTimes(forward, backward, send, once))
