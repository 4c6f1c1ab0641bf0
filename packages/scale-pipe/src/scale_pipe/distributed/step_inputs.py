"""What a rank is given for a step, cut into micro-batches. What is wrong with it fails the step on all ranks alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from scale_pipe.distributed.comm.messages import Failure, Pass, Share
from scale_pipe.distributed.errors import of_error
from scale_pipe.distributed.microbatch_grads import Samples
from scale_pipe.distributed.stage import ToLoss
from scale_pipe.microbatch import Arguments, batch_size_of, copied_to, cut, micro_batch_sizes, scatter
from scale_pipe.schedules.schedule import Schedule

OnStep = Callable[[int], Sequence[int]]
"""Steps what belongs to a stage, and returns the stages whose parameters were updated."""


class Parts(NamedTuple):
    """Something that is given for a mini-batch, by micro-batch.

    Attributes:
        of: By micro-batch.
        total: Samples of the mini-batch that it was cut from; None where each micro-batch gets the whole.
    """

    of: Sequence[Any]
    total: int | None


class Given(NamedTuple):
    """What a rank is given for a pass.

    Attributes:
        shares: Of each micro-batch, on the rank of the first stage; elsewhere they arrive.
        arguments: By stage of this rank, the `Arguments` that it is called with beside what arrives.
        to_loss: On the rank of the last stage, where a loss is wanted.
        keeps_output: On the rank of the last stage, in an evaluation: its output is wanted.
        on_step: Called for each stage where the schedule steps it; returns the stages whose parameters were updated.
        failure: What was wrong with it.
        cause: What was raised then.
        samples: Tells of the step to whoever measures gradients; None in an evaluation.
    """

    shares: Sequence[Share] = ()
    arguments: Mapping[int, Parts] = {}
    to_loss: ToLoss | None = None
    keeps_output: bool = False
    on_step: OnStep | None = None
    failure: Failure | None = None
    cause: Exception | None = None
    samples: Samples | None = None


Optimizers = Optimizer | Mapping[int, Optimizer]
"""One for all stages of a rank, or one for each."""


def stepper(optimizer: Optimizers | None, stages: Sequence[int]) -> Callable[[int], tuple[int, ...]] | None:
    """Returns what steps a stage, and says which stages were stepped; one optimizer for all steps with the last.

    Args:
        optimizer: What was given; None steps nothing.
        stages: Of this rank.

    Raises:
        TypeError: It is no optimizer.
        ValueError: It is for a stage that is not here.
    """
    if optimizer is None:
        return None
    if isinstance(optimizer, Mapping):
        by_stage = dict(optimizer)
        for stage, one in by_stage.items():
            if stage not in stages:
                raise ValueError(
                    f"an optimizer was given for stage {stage!r}, but this rank holds the stages {list(stages)}: write "
                    "optimizer={index: ... for index in pipe.stages}"
                )
            _check(one)

        def step_one(stage: int) -> tuple[int, ...]:
            if stage not in by_stage:
                return ()
            by_stage[stage].step()
            return (stage,)

        return step_one
    _check(optimizer)
    waiting = set(stages)

    def step(stage: int) -> tuple[int, ...]:
        waiting.discard(stage)
        if waiting:
            return ()
        optimizer.step()
        return tuple(stages)

    return step


def _check(optimizer: object) -> None:
    if not callable(getattr(optimizer, "step", None)):
        raise TypeError(f"expected an optimizer, or a dict of them by stage, but got {type(optimizer).__name__}")


def check_is_mean(loss_fn: Any) -> None:
    """Refuses a loss function that says of itself that it is a sum.

    The loss of a step is the mean over its micro-batches, each weighted by its samples, so of a sum over N samples it
    would be a fraction, and gradients with it. A function that sums without saying so can't be told from others.

    Args:
        loss_fn: As a user gives it: any function, a module, a partial of one; None where there is none.

    Raises:
        ValueError: It has `reduction="sum"`.
    """
    function, reduction = loss_fn, None
    while isinstance(function, partial):
        reduction = reduction or function.keywords.get("reduction")
        function = function.func
    if (reduction or getattr(function, "reduction", None)) != "sum":
        return
    title = getattr(function, "__name__", type(function).__name__)
    raise ValueError(
        f'loss_fn is expected to return the mean over the samples of a micro-batch, and {title} has reduction="sum": '
        'write reduction="mean"; or, for the gradients of the sum over a batch of N samples, '
        "loss_fn=lambda output, target: N * sum_loss(output, target) / len(target)"
    )


LossFunction = Callable[..., Any]


class Asked(NamedTuple):
    """What a step or an evaluation was called with.

    Attributes:
        arguments: Of the first stage; on other ranks they may be empty.
        target: What the loss function compares with, [N, ...]; None where it needs none.
        loss_fn: From output and target to their mean loss; None where the last stage returns it.
        stage_inputs: By stage, further arguments by keyword.
        optimizer: Steps stages as soon as their gradients are there; None leaves that to the caller.
        with_output: Of an evaluation with a loss: the output is wanted as well.
    """

    arguments: Arguments
    target: Any
    loss_fn: LossFunction | None
    stage_inputs: Mapping[int, Mapping[str, Any]]
    optimizer: Optimizers | None = None
    with_output: bool = False


def given_for(asked: Asked, kind: Pass, schedule: Schedule, rank: int, device: torch.device) -> Given:
    """Returns what this rank goes into a pass with.

    Args:
        asked: What the call says.
        kind: A step has a loss anyhow, an evaluation where it is given what makes one.
        schedule: Says which stages are here, and how many micro-batches there may be.
        rank: This one.
        device: Where it computes.
    """
    doing, stages = "what it was called with", schedule.placement.stages_of[rank]
    stage = stages[0]
    try:
        shares, arguments = [], {}
        _check_stages(asked.stage_inputs, schedule.num_stages)
        on_step = stepper(asked.optimizer, stages)
        for stage in stages:
            extra = dict(asked.stage_inputs.get(stage, {}))
            if stage == 0:
                inputs = Arguments(asked.arguments.args, {**asked.arguments.kwargs, **extra})
                parts = copied_to(device, scatter(inputs, schedule.num_micro_batches))
                shares = _shares(inputs, schedule.num_micro_batches)
                arguments[0] = Parts(parts, shares[0].total)
            elif extra:
                arguments[stage] = _cut(Arguments((), extra), schedule.num_micro_batches, device)
        given = Given(shares, arguments, on_step=on_step)
        if schedule.num_stages - 1 not in stages:
            return given
        stage = schedule.num_stages - 1
        has_loss = kind is Pass.STEP or asked.target is not None or asked.loss_fn is not None
        return given._replace(
            to_loss=_loss_of(asked, schedule.num_micro_batches, device) if has_loss else None,
            keeps_output=kind is Pass.EVALUATION and (asked.with_output or not has_loss),
        )
    except Exception as error:
        return Given(failure=of_error(error, rank=rank, stage=stage, micro_batch=-1, doing=doing), cause=error)


def _shares(inputs: Any, chunks: int) -> list[Share]:
    total = batch_size_of(inputs)
    assert total is not None
    sizes = micro_batch_sizes(total, chunks)
    return [Share(size, total, len(sizes)) for size in sizes]


def _check_stages(stage_inputs: Any, num_stages: int) -> None:
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


def _cut(inputs: Any, chunks: int, device: torch.device) -> Parts:
    """Cuts inputs; those without a tensor [N, ...] go to every micro-batch."""
    total = batch_size_of(inputs)
    parts = [inputs] * chunks if total is None else cut(inputs, micro_batch_sizes(total, chunks))
    return Parts(copied_to(device, parts), total)


def _loss_of(asked: Asked, chunks: int, device: torch.device) -> ToLoss:
    check_is_mean(asked.loss_fn)
    loss_fn, targets = asked.loss_fn, Parts([], None)
    if asked.target is not None:
        targets = _cut(asked.target, chunks, device)

    def to_loss(output: Any, micro_batch: int, share: Share) -> Any:
        if targets.total is not None and targets.total != share.total:
            raise ValueError(
                f"the mini-batch has {share.total} samples, and target has {targets.total}: give target for the same "
                "samples"
            )
        if loss_fn is None:
            return output
        if asked.target is not None:
            return loss_fn(output, targets.of[micro_batch])
        try:
            return loss_fn(output)
        except TypeError as error:
            error.add_note(
                "No target was given on the rank of the last stage: write target=target, as loss_fn takes it"
            )
            raise

    return to_loss
