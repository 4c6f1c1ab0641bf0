"""What one rank holds, computes and sends in a step: the real training step on tensors without memory.

The second step is counted, since AdamW makes its state in the first. Of a pipeline the first and the last rank, and the
one with the most blocks times live micro-batches, run the schedule's own order of computations on their own stages: the
highest peak and the longest step count. What they exchange is added up from the shapes.

The time of a step comes from simulated streams, with the rates of the options; for a pipeline see `stages`. Where a
model does not run there, the time is a sum (`step_time`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from scale_check.simulate import Simulation, simulate
from scale_check.simulate.durations import OperatorBytes, durations
from scale_check.simulate.memory import Memory
from scale_core.comm.group import Group, group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import full_numel
from scale_fsdp import ShardOptions
from scale_oss import OSS, ShardedDataParallel
from scale_pipe.schedules.simulation import simulate as simulate_schedule
from scale_tools.plan.model import PlannedModel
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.parallelize import autocast, build, checkpoint_blocks, dims_of
from scale_tools.plan.stages import (
    averaged_bytes,
    build_stage,
    pipeline_seconds,
    ranks_to_simulate,
    schedule_of,
    step_of_stage,
)
from scale_tools.plan.step_time import StepWork, rates_of, step_seconds
from scale_tools.plan.strategies import Strategy
from scale_tp import context_parallel, parallelize, position_ids, split_sequence
from scale_train.errors import InputError
from scale_train.options import ParallelOptions
from scale_train.training.parallel.parallelize_gpt import (
    COMPUTE_DTYPES,
    shard_units,
    sharding_of,
)


def _attention_flops(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _attention_backward_flops(grad: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    return int(sdpa_backward_flop_count(grad, query, key, value))


# torch's counter knows the attention kernels of GPUs; these are the same on the host.
_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
}


_NOT_COUNTED = ("aten::_fused_", *(f"aten::{operator.__name__}" for operator in _FLOPS))
"""Operators of the optimizer, and those whose operations are counted."""


@dataclass(frozen=True)
class Estimate:
    """What one rank needs with a strategy.

    Attributes:
        strategy: The way to train.
        peak_by_kind: Bytes of the device at its peak, by what they are for.
        host_peak_by_kind: Likewise of the host, where something is kept there.
        bytes_sent: Bytes that the rank sends in a step, by collective.
        work: What the time of a step follows from, where it is not simulated.
        seconds: The time of a step on simulated streams; None where the model does not run there.
        reserved_bytes: What torch's allocator reserves of the device, more than what tensors take; None for a pipeline
            and where the model does not run on simulated streams.
        at_least_bytes: What parameters, gradients and optimizer state take, where that is too much by itself and
            nothing more was looked at.
        problem: Why the model can't be trained so; "" where it can.
    """

    strategy: Strategy
    peak_by_kind: dict[str, int] = field(default_factory=dict)
    host_peak_by_kind: dict[str, int] = field(default_factory=dict)
    bytes_sent: dict[str, int] = field(default_factory=dict)
    work: StepWork | None = None
    seconds: float | None = None
    reserved_bytes: int | None = None
    at_least_bytes: int = 0
    problem: str = ""

    @property
    def peak_bytes(self) -> int:
        """The most bytes of the device, or what is known to be needed at least."""
        return sum(self.peak_by_kind.values()) or self.at_least_bytes

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
    except (ValueError, TypeError, RuntimeError) as error:  # NotImplementedError is a RuntimeError.
        return Estimate(strategy, problem=str(error).splitlines()[0])


def _estimate_replica(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> Estimate:
    """Every technique but the pipeline: this rank has a part of the batch and calls the whole model."""
    asked = strategy.parallel_options(options.precision)
    with simulate(world_size=strategy.ranks, device="sim" if strategy.has_host_memory else "cpu") as simulation:
        with simulation.aside():
            dims = dims_of(asked)
        # On the host, where shards that are offloaded stay.
        replica = _replica(planned, strategy, options, dims, simulation)
        optimizer = replica.optimizer
        operators = _two_steps(replica.step, simulation)
        updated = sum(param.numel() for group in optimizer.param_groups for param in group["params"])
        if isinstance(optimizer, OSS):
            updated = sum(param.numel() for param in optimizer.param_groups[0]["params"]) // dims.size("loss")
        estimate = _read(strategy, simulation, operators, updated, dims, replica.offloaded_bytes)
    streamed = step_on_streams(planned, strategy, options)
    if streamed is None:
        return estimate
    return replace(estimate, seconds=streamed.seconds, reserved_bytes=streamed.reserved_bytes)


class StreamedStep(NamedTuple):
    """The third step of a replica on simulated streams: its time, and what the allocator had reserved until its end."""

    seconds: float
    reserved_bytes: int


def step_on_streams(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> StreamedStep | None:
    """Runs three steps on simulated streams; None where the model does not run there."""
    asked, rates = strategy.parallel_options(options.precision), rates_of(options, strategy.ranks)
    try:
        with simulate(world_size=strategy.ranks, device="sim", check=False) as simulation:
            with simulation.aside():
                dims = dims_of(asked)
            with durations(simulation, rates.of_streams()) as clocks:
                replica = _replica(planned, strategy, options, dims, simulation)
                simulation.empty_cache()  # Of the whole model, which fully_shard makes unit by unit.
                simulation.restart()
                for _ in range(3):
                    clocks.host = begin = clocks.now
                    replica.step()
                return StreamedStep(clocks.now - begin, simulation.peak_reserved_bytes)
    except (ValueError, TypeError, RuntimeError):  # For example, an operator has no kernel there.
        return None


@dataclass
class _Replica:
    """A rank's step, and what it has moved to the host."""

    optimizer: Optimizer
    step: Callable[[], None]
    offloaded_bytes: int = 0  # of activations


def _replica(
    planned: PlannedModel, strategy: Strategy, options: PlanOptions, dims: ParallelDims, simulation: Simulation
) -> _Replica:
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
        before = simulation.on("cpu").current_bytes
        with _divided_sequence(dims) as divide:
            with autocast(None if asked.parallel == "fsdp" else dtype, simulation.device.type):
                result = divide(loss, called, tokens[:, :-1], tokens[:, 1:])
            if strategy.offload:
                replica.offloaded_bytes = simulation.on("cpu").current_bytes - before
            scaler.scale(result).backward()
        scaler.step(optimizer)
        scaler.update()
        if isinstance(optimizer, OSS):
            optimizer.wait()
        optimizer.zero_grad()

    replica = _Replica(optimizer, step)
    return replica


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


class _Operators(NamedTuple):
    """What the operators of a step do: operations of products, and bytes of all others but the optimizer's."""

    flops: int
    num_bytes: int


def _two_steps(step: Callable[[], None], simulation: Simulation) -> _Operators:
    """Runs a step whose operators are counted, and one whose memory and traffic are; returns the first."""
    with FlopCounterMode(display=False, custom_mapping=_FLOPS) as counter, OperatorBytes(*_NOT_COUNTED) as others:
        step()
    gc.collect()  # The counter keeps tensors of a backward pass in cycles: in the step that is measured there is none.
    simulation.restart()
    step()
    return _Operators(int(counter.get_total_flops()), others.total)


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
    """The memory of the rank that needs most, the work of the slowest one, and the time of the schedule."""
    rates, ranks = rates_of(options, strategy.ranks), ranks_to_simulate(planned, strategy)
    estimates = [_estimate_stages(planned, strategy, options, rank) for rank in ranks]
    slowest = max(estimates, key=lambda estimate: 0.0 if estimate.work is None else step_seconds(estimate.work, rates))
    fullest = max(estimates, key=lambda estimate: estimate.peak_bytes)
    seconds = pipeline_seconds(planned, strategy, options)
    return replace(fullest, work=slowest.work, bytes_sent=slowest.bytes_sent, seconds=seconds)


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
        operators = _two_steps(step, simulation)
        estimate = _read(strategy, simulation, operators, sum(param.numel() for param in params), dims)
        reduced = 0 if strategy.shards_stages else averaged_bytes(built.stage, dims)
    return _with_messages(estimate, strategy.chunks * (built.bytes_received + built.bytes_sent), reduced)


def _with_messages(estimate: Estimate, exchanged: int, reduced: int) -> Estimate:
    """Returns the estimate of a stage with the bytes that it exchanges with its neighbors, and averages."""
    assert estimate.work is not None
    work = estimate.work._replace(
        overlapped_bytes=estimate.work.overlapped_bytes + exchanged,
        after_step_bytes=estimate.work.after_step_bytes + reduced,
        bubble=simulate_schedule(schedule_of(estimate.strategy)).bubble,
    )
    sent = {"send": exchanged, **estimate.bytes_sent}
    if reduced:
        sent["all_reduce"] = sent.get("all_reduce", 0) + reduced
    return replace(estimate, host_peak_by_kind={}, bytes_sent=sent, work=work)


def _read(
    strategy: Strategy,
    simulation: Simulation,
    operators: _Operators,
    updated: int,
    dims: ParallelDims,
    offloaded: int = 0,
) -> Estimate:
    """What the simulation has counted of the second step."""
    on_host = strategy.parallel == "fsdp-offload"
    inside = overlapped = after = 0
    for collective in simulation.collectives:
        in_ring = dims.cp > 1 and collective.ranks == group_of(dims, "cp").ranks  # It runs beside its attention.
        waits = collective.op == "all_to_all" and not in_ring
        if waits or (dims.tp > 1 and collective.ranks == group_of(dims, "tp").ranks):
            inside += collective.bytes_sent
        elif collective.phase == "step":
            after += collective.bytes_sent
        else:
            overlapped += collective.bytes_sent
    # Shards go to the device for the forward and for the backward, gradients to the host; activations there and back.
    copied = (3 * updated * 4 if on_host else 0) + 2 * offloaded
    work = StepWork(operators.flops, overlapped, inside, after, copied, updated, on_host, 0.0, operators.num_bytes)
    host = _host_peak(simulation.on("cpu")) if strategy.has_host_memory else {}
    return Estimate(strategy, simulation.peak_by_kind, host, simulation.bytes_sent, work)


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
