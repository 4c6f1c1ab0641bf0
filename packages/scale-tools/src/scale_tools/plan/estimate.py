"""What one rank holds, computes and sends in a step: the real training step on tensors without memory.

Memory and time come from one run on a simulated GPU. A model that does not run there is run on the host, which gives
its memory; then the estimate says why it has no time. A pipeline is in `stages`.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from scale_core.comm.group import group_of
from scale_core.comm.mesh import ParallelDims
from scale_core.optim.grad_scaler import ShardedGradScaler
from scale_core.shard import full_numel
from scale_fsdp import ShardOptions
from scale_oss import OSS, ShardedDataParallel
from scale_tools.plan.model import PlannedModel
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.parallelize import autocast, build, checkpoint_blocks
from scale_tools.plan.simulated_rank import Device, Estimate, simulated_rank
from scale_tools.plan.stages import estimate_pipeline
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
    """Returns what a step of a rank takes; the problem where the model can't be trained so."""
    try:
        return _estimate(planned, strategy, options)
    except InputError:
        raise
    except _DOES_NOT_RUN as error:
        return Estimate(strategy, problem=str(error).splitlines()[0])


def _estimate(planned: PlannedModel, strategy: Strategy, options: PlanOptions) -> Estimate:
    if strategy.parallel == "pipe":
        return estimate_pipeline(planned, strategy, options)
    try:
        return estimate_replica(planned, strategy, options)
    except _DOES_NOT_RUN as error:
        if isinstance(error, InputError) or strategy.has_host_memory:  # The host alone can't tell two memories apart.
            raise
        return replace(estimate_replica(planned, strategy, options, "cpu"), no_time_reason=_no_time_reason(error))


def estimate_replica(
    planned: PlannedModel, strategy: Strategy, options: PlanOptions, device: Device = "sim"
) -> Estimate:
    """Every technique but the pipeline: this rank has a part of the batch and calls the whole model."""
    with simulated_rank(strategy, options, device) as rank:
        step = _step_of_replica(planned, strategy, options, rank.dims, rank.simulation.device)
        return rank.estimate(strategy, [step] * 3)


def _no_time_reason(error: BaseException) -> str:
    """Names the operator that has failed, and the innermost module around it, from the traceback of the error."""
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    operators = [caller.name() for caller in callers if isinstance(caller, torch._ops.OpOverload)]
    modules = [type(caller).__name__ for caller in callers if isinstance(caller, nn.Module)]
    names = " of ".join([*operators[:1], *modules[-1:]])
    if not names:
        return f"there is no simulated GPU: {str(error).splitlines()[0]}"
    return f"{names} does not run on the simulated GPU"


def _step_of_replica(
    planned: PlannedModel, strategy: Strategy, options: PlanOptions, dims: ParallelDims, device: torch.device
) -> Callable[[], None]:
    dtype, asked = COMPUTE_DTYPES.get(options.precision), strategy.parallel_options(options.precision)
    with nullcontext() if strategy.has_host_memory else device:
        model, loss = build(planned, dims)
    checkpoint_blocks(planned, strategy, model)
    if dims.tp > 1:
        parallelize(model, planned.tensor_plan, dims, attention_rules=planned.attention_rules)
    called, optimizer = _parallelized(planned, asked, model, dims, device)
    scaler = ShardedGradScaler(device.type, enabled=dtype == torch.float16)
    batch = options.batch // strategy.data_ranks

    def step() -> None:
        tokens = torch.zeros(batch, options.sequence + 1, dtype=torch.int64, device=device)
        with _divided_sequence(dims) as divide:
            with autocast(None if asked.parallel == "fsdp" else dtype, device.type):
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


def _parallelized(
    planned: PlannedModel, asked: ParallelOptions, model: nn.Module, dims: ParallelDims, device: torch.device
) -> tuple[nn.Module, Optimizer]:
    """Returns what is called, and the optimizer, as `make_engine` makes them of a GPT."""
    arguments: dict[str, Any] = {"lr": 1e-3, "fused": True}
    if asked.parallel == "fsdp":
        shard_options = ShardOptions(compute_device=device)
        shard_units(model, planned.blocks(model), dims, options=shard_options, **sharding_of(asked))
        return model, AdamW(model.parameters(), **arguments)
    if asked.parallel == "sharded-ddp":
        optimizer = OSS(model.parameters(), AdamW, dims, **arguments)
        return ShardedDataParallel(model, optimizer), optimizer
    data = group_of(dims, "loss")
    if data.size > 1:
        options: dict[str, Any] = {"init_sync": False, "gradient_as_bucket_view": True}
        model = DistributedDataParallel(model, process_group=data.process_group, **options)
    if asked.parallel == "oss":
        return model, OSS(model.parameters(), AdamW, dims, **arguments)
    return model, AdamW(model.parameters(), **arguments)


def count_parameters(planned: PlannedModel) -> int:
    """Returns the number of elements of the parameters, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        return sum(full_numel(param) for param in planned.build().model.parameters())
