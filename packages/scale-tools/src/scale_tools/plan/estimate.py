"""What one rank holds, computes and sends in a step: the real training step on tensors without memory.

The second step is counted, since AdamW makes its state in the first. Of a pipeline the first and the last rank, and the
one with the most blocks times live micro-batches, run the schedule's own order of computations on their own stages: the
highest peak and the most bytes count. What they exchange is added up from the shapes.

The time of a step comes from simulated streams, with the rates of the options; for a pipeline see `stages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from scale_check.simulate import Simulation, simulate
from scale_check.simulate.durations import durations
from scale_check.simulate.memory import Memory
from scale_core.comm.group import Group, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import full_numel
from scale_fsdp import ShardOptions
from scale_oss import OSS, ShardedDataParallel
from scale_tools.plan.model import PlannedModel
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.parallelize import autocast, build, checkpoint_blocks, dims_of
from scale_tools.plan.rates import rates_of
from scale_tools.plan.stages import (
    averaged_bytes,
    build_stage,
    pipeline_seconds,
    ranks_to_simulate,
    step_of_stage,
)
from scale_tools.plan.strategies import Strategy
from scale_tp import context_parallel, parallelize, position_ids, split_sequence
from scale_train.errors import InputError
from scale_train.options import ParallelOptions
from scale_train.training.parallel.parallelize_gpt import (
    COMPUTE_DTYPES,
    shard_units,
    sharding_of,
)

_DOES_NOT_RUN = (ValueError, TypeError, RuntimeError)  # NotImplementedError is a RuntimeError.


@dataclass(frozen=True)
class Estimate:
    """What one rank needs with a strategy.

    Attributes:
        strategy: The way to train.
        peak_by_kind: Bytes of the device at its peak, by what they are for.
        host_peak_by_kind: Likewise of the host, where something is kept there.
        bytes_sent: Bytes that the rank sends in a step, by collective.
        seconds: The time of a step on simulated streams; None where the model does not run there.
        reserved_bytes: The bytes that torch's caching allocator reserves, more than the tensors take. None for a
            pipeline, and where the model does not run on simulated streams.
        at_least_bytes: What parameters, gradients and optimizer state take, where that is too much by itself and
            nothing more was looked at.
        problem: Why the model can't be trained so; "" where it can.
    """

    strategy: Strategy
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    host_peak_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    seconds: float | None = None
    reserved_bytes: int | None = None
    at_least_bytes: int = 0
    problem: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the device, or what is known to be needed at least."""
        return sum(self.peak_by_kind.values()) or self.at_least_bytes

    @property
    def is_lower_bound(self) -> bool:
        """Whether no step was run, because the state is too large by itself."""
        return not self.peak_by_kind and not self.problem

    @property
    def host_bytes(self) -> int:
        """The most bytes of the host, for one rank."""
        return sum(self.host_peak_by_kind.values())


def least_bytes(strategy: Strategy, num_params: int) -> int:
    """Returns the bytes of fp32 parameters, gradients and AdamW's state of one rank's device.

    >>> least_bytes(Strategy("ddp", 8), 10**9), least_bytes(Strategy("fsdp", 8), 10**9)
    (16000000000, 2000000000)
    """
    data, model = strategy.data_ranks, strategy.model_ranks
    match strategy.parallel:
        case "fsdp-offload":
            return 0
        case "fsdp" | "tensor-parallel" | "context-parallel":
            return 16 * num_params // strategy.ranks
        case "pipe" if strategy.shards_stages:
            return 16 * num_params // strategy.ranks
        case "sharded-ddp":
            return 4 * num_params + 12 * num_params // data
        case "oss":
            return 8 * num_params + 8 * num_params // data
    return 16 * num_params // (model * strategy.tensor_ranks * strategy.expert_ranks)


def estimate(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> Estimate:
    """Runs two steps of a rank and returns what the second takes; the problem where the model can't be trained so."""
    try:
        if strategy.parallel == "pipe":
            return _estimate_pipeline(planned, strategy, options)
        return _estimate_replica(planned, strategy, options)
    except InputError:
        raise
    except _DOES_NOT_RUN as error:
        return Estimate(strategy, problem=str(error).splitlines()[0])


def _estimate_replica(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> Estimate:
    """Every technique but the pipeline: this rank has a part of the batch and calls the whole model."""
    asked = strategy.parallel_options(options.precision)
    with simulate(world_size=strategy.ranks, device="sim" if strategy.has_host_memory else "cpu") as simulation:
        with simulation.aside():
            dims = dims_of(asked)
        # On the host, where shards that are offloaded stay.
        step = _step_of_replica(planned, strategy, options, dims, simulation)
        _two_steps(step, simulation)
        host = _host_peak(simulation.on("cpu")) if strategy.has_host_memory else {}
        peak_by_kind, bytes_sent = simulation.peak_by_kind, simulation.bytes_sent
    estimate = Estimate(strategy, peak_by_kind, host, bytes_sent)
    try:
        seconds, reserved_bytes = step_on_streams(planned, strategy, options)
    except _DOES_NOT_RUN:  # For example, an operator has no kernel on the simulated device.
        return estimate
    return replace(estimate, seconds=seconds, reserved_bytes=reserved_bytes)


class StreamedStep(NamedTuple):
    """The time of a replica's third step on simulated streams, and the most bytes reserved in all three steps."""

    seconds: float
    reserved_bytes: int


def step_on_streams(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> StreamedStep:
    """Runs three steps on simulated streams."""
    asked, rates = strategy.parallel_options(options.precision), rates_of(options, strategy.ranks)
    with simulate(world_size=strategy.ranks, device="sim", check=False) as simulation:
        with simulation.aside():
            dims = dims_of(asked)
        with durations(simulation, rates) as clocks:
            step = _step_of_replica(planned, strategy, options, dims, simulation)
            simulation.empty_cache()  # Frees segments of the full model, because training may build it unit by unit.
            simulation.restart()
            for _ in range(3):
                clocks.host = begin = clocks.now
                step()
            return StreamedStep(clocks.now - begin, simulation.peak_reserved_bytes)


def _step_of_replica(
    planned: PlannedModel, strategy: Strategy, options: PlanOptions, dims: ParallelDims, simulation: Simulation
) -> Callable[[], None]:
    dtype, asked = COMPUTE_DTYPES.get(options.precision), strategy.parallel_options(options.precision)
    with nullcontext() if strategy.has_host_memory else torch.device(simulation.device):
        model, loss = build(planned, dims)
    checkpoint_blocks(planned, strategy, model)
    if dims.tp > 1:
        parallelize(model, planned.tensor_plan, dims, attention_rules=planned.attention_rules)
    called, optimizer = _parallelized(planned, asked, model, dims, simulation)
    scaler = ShardedGradScaler(simulation.device.type, enabled=dtype == torch.float16)
    batch = options.batch // strategy.data_ranks

    def step() -> None:
        tokens = torch.zeros(batch, options.sequence + 1, dtype=torch.int64, device=simulation.device)
        with _divided_sequence(dims) as divide:
            with autocast(None if asked.parallel == "fsdp" else dtype, simulation.device.type):
                result = divide(loss, called, tokens[:, :-1], tokens[:, 1:])
            scaler.scale(result).backward()
        scaler.step(optimizer)
        scaler.update()
        if isinstance(optimizer, OSS):
            optimizer.wait()
        optimizer.zero_grad()

    return step


@contextmanager
def _divided_sequence(dims: ParallelDims) -> Iterator[Callable[..., Tensor]]:
    """Around a forward and its backward; gives what calls a loss with this rank's part of the sequences."""
    if dims.cp == 1:
        yield lambda loss, *arguments: loss(*arguments)
        return

    def divided(loss: object, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = position_ids(tokens.shape[1], dims, device=tokens.device)
        tokens, targets = (split_sequence(each, dims) for each in (tokens, targets))
        result: Tensor = model(tokens, targets, positions=positions)
        return result

    with context_parallel(dims):
        yield divided


def _two_steps(step: Callable[[], None], simulation: Simulation) -> None:
    """Runs a step, and one whose memory and traffic are counted."""
    step()
    simulation.restart()
    step()


def _parallelized(
    planned: PlannedModel, asked: ParallelOptions, model: nn.Module, dims: ParallelDims, simulation: Simulation
) -> tuple[nn.Module, Optimizer]:
    """Returns what is called, and the optimizer, as `make_engine` makes them of a GPT."""
    arguments: dict[str, Any] = {"lr": 1e-3, "fused": True}
    if asked.parallel == "fsdp":
        shard_options = ShardOptions(compute_device=simulation.device)
        shard_units(model, planned.blocks(model), dims, options=shard_options, **sharding_of(asked))
        return model, AdamW(model.parameters(), **arguments)
    if asked.parallel == "sharded-ddp":
        optimizer = OSS(model.parameters(), AdamW, dims, **arguments)
        return ShardedDataParallel(model, optimizer), optimizer
    called = _averaging(model, group_of(dims, "loss"), simulation)
    if asked.parallel == "oss":
        return called, OSS(model.parameters(), AdamW, dims, **arguments)
    return called, AdamW(model.parameters(), **arguments)


def _averaging(model: nn.Module, data: Group, simulation: Simulation) -> nn.Module:
    """Returns the model in `DistributedDataParallel`, or on the host with buckets that stay, as it has them."""
    if data.size == 1:
        return model
    if simulation.device.type != "cpu":
        options: dict[str, Any] = {"init_sync": False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, process_group=data.process_group, **options)
    buckets = {param: torch.zeros_like(param) for param in model.parameters() if param.requires_grad}

    def reduce(param: nn.Parameter) -> None:
        bucket, gradient = buckets[param], param.grad
        assert gradient is not None
        bucket.copy_(gradient)
        param.grad = bucket
        dist.all_reduce(bucket, group=data.process_group)

    for param, bucket in buckets.items():
        simulation.label(bucket, "gradients")
        param.register_post_accumulate_grad_hook(reduce)
    return model


def _estimate_pipeline(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> Estimate:
    """The memory of the rank that needs most, the most bytes that one sends, and the time of the schedule."""
    ranks = ranks_to_simulate(planned, strategy)
    estimates = [_estimate_stages(planned, strategy, options, rank) for rank in ranks]
    fullest = max(estimates, key=lambda estimate: estimate.peak_bytes)
    sent = max((estimate.bytes_sent for estimate in estimates), key=lambda sent: sum(sent.values()))
    result = replace(fullest, bytes_sent=sent)
    try:
        return replace(result, seconds=pipeline_seconds(planned, strategy, options))
    except _DOES_NOT_RUN:
        return result


def _estimate_stages(planned: PlannedModel, strategy: Strategy, options: PlanOptions, rank: int) -> Estimate:
    """A rank of a pipeline: its stages, in the order of the schedule."""
    asked = strategy.parallel_options(options.precision)
    with simulate(world_size=strategy.ranks) as simulation:
        with simulation.aside():
            dims = dims_of(asked)
        built = build_stage(planned, strategy, dims, rank, options)
        params = list(built.stage.parameters())
        # Pipelines beside each other average whole stages by DistributedDataParallel, which keeps buckets as well.
        has_buckets = dims.size("edp") > 1 and not strategy.shards_stages
        buckets = [torch.zeros_like(param) for param in params] if has_buckets else []
        for bucket in buckets:
            simulation.label(bucket, "reduction")

        def average() -> None:
            if has_buckets:  # The message that has the gradients of all parameters.
                torch.cat([param.grad.view(-1) for param in params if param.grad is not None])

        step = step_of_stage(built, strategy, asked, rank, average=average)
        _two_steps(step, simulation)
        # Also the bytes that it exchanges with its neighbors, and of the gradients that it averages.
        sent = {"send": strategy.chunks * (built.bytes_received + built.bytes_sent), **simulation.bytes_sent}
        if not strategy.shards_stages and (reduced := averaged_bytes(built.stage, dims)):
            sent["all_reduce"] = sent.get("all_reduce", 0) + reduced
        return Estimate(strategy, simulation.peak_by_kind, {}, sent)


def _host_peak(memory: Memory) -> dict[str, int]:
    """The peak of the host by kind, with what torch adds to pinned memory: it rounds each piece to a power of two."""
    # The optimizer's state is updated where it is. All else is pinned, so that it is copied while the device computes.
    pinned = [item for item in memory.largest_at_peak if item.kind != "optimizer state"]
    added = sum(item.copies * ((1 << (item.num_bytes - 1).bit_length()) - item.num_bytes) for item in pinned)
    return memory.peak_by_kind | ({"rounding of pinned memory": added} if added else {})


def count_parameters(planned: PlannedModel) -> int:
    """Returns the number of elements of the parameters, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        return sum(full_numel(param) for param in planned.build().model.parameters())
