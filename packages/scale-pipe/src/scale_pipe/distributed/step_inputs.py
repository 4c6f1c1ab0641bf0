"""The inputs of one rank for a pass, cut into micro-batches; an error in them fails the step on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from scale_core import uneven_inputs
from scale_core.tree import map_tensors
from scale_pipe.distributed.errors import failure_from_error
from scale_pipe.distributed.loss import BatchLoss
from scale_pipe.distributed.p2p.messages import ChunkSize, Failure, StepKind
from scale_pipe.microbatch import (
    Arguments,
    Chunks,
    batch_size_of,
    copy_to,
    scatter,
    scatter_with_sizes,
    unwrap_no_chunk,
)
from scale_pipe.schedules.schedule import Schedule

LossFunction = Callable[..., Any]

_JOINED = (
    "join() has no batch left for one of the ranks, and a pipeline can't train on the others alone: its ranks share a "
    "batch, and a DistributedPipe does not weigh its gradients. Give all ranks the same number of batches, for example "
    "DistributedSampler(drop_last=True), and leave join() out"
)

Optimizers = Optimizer | Mapping[int, Optimizer]
"""One for all stages of a rank, or one for each."""

StepOptimizer = Callable[[int], Sequence[int]]
"""Steps a stage, and returns the stages whose parameters were updated."""


class StepArgs(NamedTuple):
    """The arguments of a call of `step` or `evaluate`."""

    arguments: Arguments  # of the first stage; on other ranks they may be empty
    target: Any  # [N, ...], or None
    loss_fn: LossFunction | None  # None where the last stage returns the loss
    stage_inputs: Mapping[int, Mapping[str, Any]]  # by stage, further arguments by keyword
    optimizer: Optimizers | None = None  # None leaves stepping to the caller
    with_output: bool = False  # of an evaluation with a loss


class StepInputs(NamedTuple):
    """The inputs of a rank for a pass."""

    chunk_sizes: Sequence[ChunkSize] = ()  # on the rank of the first stage; elsewhere they arrive
    arguments: Mapping[int, Chunks] = {}  # by stage of this rank, the `Arguments` in addition to received values
    loss_fn: BatchLoss | None = None  # on the rank of the last stage, where a loss is wanted
    keep_output: bool = False  # on the rank of the last stage, in an evaluation
    step_optimizer: StepOptimizer | None = None  # called for each stage where the schedule steps it
    failure: Failure | None = None  # a mistake in them
    cause: Exception | None = None


def prepare_inputs(args: StepArgs, kind: StepKind, schedule: Schedule, rank: int, device: torch.device) -> StepInputs:
    """Cuts the arguments of a call into micro-batches on this rank's device; errors are in `failure`."""
    num_stages, chunks = len(schedule.placement.rank_of), schedule.num_micro_batches
    stages = schedule.placement.stages_of[rank]
    stage = stages[0]
    try:
        _check_stage_inputs(args.stage_inputs, num_stages)
        if kind is StepKind.STEP and uneven_inputs.active_share is not None:
            raise RuntimeError(_JOINED)
        step_optimizer = None if args.optimizer is None else optimizer_stepper(args.optimizer, stages)
        chunk_sizes: list[ChunkSize] = []
        arguments: dict[int, Chunks] = {}
        for stage in stages:
            extra = dict(args.stage_inputs.get(stage, {}))
            if stage == 0:
                inputs = Arguments(args.arguments.args, {**args.arguments.kwargs, **extra})
                parts, sizes = scatter_with_sizes(inputs, chunks)
                total = sum(sizes)
                chunk_sizes = [ChunkSize(size, total, len(sizes)) for size in sizes]
                arguments[0] = Chunks(copy_to(device, parts), total)
            elif extra:
                arguments[stage] = _cut(Arguments((), extra), chunks, device)
        inputs_of_rank = StepInputs(chunk_sizes, arguments, step_optimizer=step_optimizer)
        if num_stages - 1 not in stages:
            return inputs_of_rank
        stage = num_stages - 1
        has_loss = kind is StepKind.STEP or args.target is not None or args.loss_fn is not None
        return inputs_of_rank._replace(
            loss_fn=_batch_loss(args, chunks, device) if has_loss else None,
            keep_output=kind is StepKind.EVALUATION and (args.with_output or not has_loss),
        )
    except Exception as error:
        failure = failure_from_error(error, rank=rank, stage=stage, action="what it was called with")
        return StepInputs(failure=failure, cause=error)


def optimizer_stepper(optimizer: Optimizers, stages: Sequence[int]) -> StepOptimizer:
    """Steps one optimizer for all stages with the last of them, or each stage's own."""
    by_stage = optimizer if isinstance(optimizer, Mapping) else dict.fromkeys(stages, optimizer)
    for stage, one in by_stage.items():
        if stage not in stages:
            raise ValueError(
                f"an optimizer was given for stage {stage!r}, but this rank holds the stages {list(stages)}: write "
                "optimizer={index: ... for index in pipe.stages}"
            )
        if not callable(getattr(one, "step", None)):
            raise TypeError(f"expected an optimizer, or a dict of them by stage, but got {type(one).__name__}")
    waiting = set(stages)

    def step(stage: int) -> Sequence[int]:
        waiting.discard(stage)
        done = [stage] if isinstance(optimizer, Mapping) else [] if waiting else stages
        if stage not in by_stage or not done:
            return ()
        by_stage[stage].step()
        return done

    return step


def check_mean_loss(loss_fn: Any) -> None:
    """Refuses a loss function with `reduction="sum"`, also in a partial (ValueError).

    The loss of a step is the mean over its micro-batches, each weighted by its samples, so of a sum over N samples it
    would be a fraction, and gradients with it. A function that sums without an attribute can't be distinguished from
    others.
    """
    function, reduction = loss_fn, None
    while isinstance(function, partial):
        reduction = reduction or function.keywords.get("reduction")
        function = function.func
    if (reduction or getattr(function, "reduction", None)) != "sum":
        return
    title = getattr(function, "__name__", type(function).__name__)
    raise ValueError(
        f'loss_fn is expected to return the mean over the samples of a micro-batch, and {title} has reduction="sum". '
        'Write reduction="mean"; or, for the gradients of the sum over a batch of N samples, '
        "loss_fn=lambda output, target: N * sum_loss(output, target) / len(target)"
    )


def _check_stage_inputs(stage_inputs: Any, num_stages: int) -> None:
    if not isinstance(stage_inputs, Mapping):
        raise TypeError(
            f"expected stage_inputs to be a dict of keyword arguments by stage, but got {type(stage_inputs).__name__}: "
            'write stage_inputs={1: {"mask": mask}}'
        )
    for index in stage_inputs:
        if index not in range(num_stages):
            raise ValueError(
                f"stage_inputs has inputs for stage {index!r}, but there are {num_stages} stages, 0 to {num_stages - 1}"
            )


def _cut(inputs: Any, chunks: int, device: torch.device) -> Chunks:
    """Cuts inputs; those without a tensor [N, ...] go to every micro-batch."""
    total = batch_size_of(inputs)
    parts = [unwrap_no_chunk(inputs)] * chunks if total is None else scatter(inputs, chunks)
    return Chunks(copy_to(device, parts), total)


def _batch_loss(args: StepArgs, chunks: int, device: torch.device) -> BatchLoss:
    check_mean_loss(args.loss_fn)
    if args.target is None:
        return BatchLoss(args.loss_fn, None)
    with torch.inference_mode(False):  # The graph of a loss may keep them.
        target = map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, args.target)
        return BatchLoss(args.loss_fn, _cut(target, chunks, device))
