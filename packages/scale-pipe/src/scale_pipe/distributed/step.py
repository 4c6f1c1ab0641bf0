"""A step of one rank: its arguments are cut into micro-batches, its program runs, and all ranks hear how it went.

A mistake in the arguments, or a stage that fails, fails the step on all ranks; so each step ends on all with a result,
or on all with an error.

The names of torch.distributed.pipelining, and ours:

    forward_one_chunk, backward_one_chunk        `Stage.forward`, `Stage.backward`
    stage_backward_input, stage_backward_weight  `SplitBackward`, and `Stage.weight_gradients`
    get_fwd_recv_ops, get_fwd_send_ops (P2POp)   `P2PChannel.post_receive`, `P2PChannel.send`
    _PipelineScheduleRuntime                     `PassRuntime`
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from scale_core import ContractError, ScaleDistributedError, uneven_inputs
from scale_core.comm.collectives import exchange, exchange_text
from scale_core.comm.fork import forked_error
from scale_core.consistency.contract import Contract
from scale_core.consistency.flight_recorder import FlightRecorder
from scale_core.errors import TransferError, recovery_hint
from scale_core.optim.step_differences import describe_difference
from scale_core.optim.step_hooks import OptimizerSteps, have_diverged
from scale_core.shard import as_local
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad
from scale_core.tree import map_tensors
from scale_pipe.distributed import errors
from scale_pipe.distributed.gradients.data_parallel import optimizer_shards
from scale_pipe.distributed.loss import BatchLoss, check_mean_loss
from scale_pipe.distributed.message import ChunkSize, Failure
from scale_pipe.distributed.p2p import P2PError
from scale_pipe.distributed.program import StepKind
from scale_pipe.distributed.runtime import PassRuntime, StepInputs, StepOptimizer
from scale_pipe.distributed.stage import Stage
from scale_pipe.microbatch import (
    Arguments,
    Chunks,
    batch_size_of,
    copy_to,
    scatter,
    scatter_with_sizes,
    unwrap_no_chunk,
)
from scale_pipe.schedules.action import Action
from scale_pipe.schedules.schedule import Schedule

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_OWN_STEPS = "Stages may have hyperparameters of their own from the first step on, or by groups of their own"

_JOINED = (
    "join() has no batch left for one of the ranks, and a pipeline can't train on the others alone: its ranks share a "
    "batch, and a DistributedPipe does not weigh its gradients. Give all ranks the same number of batches, for example "
    "DistributedSampler(drop_last=True), and leave join() out"
)

LossFunction = Callable[..., Any]

Optimizers = Optimizer | Mapping[int, Optimizer]
"""One for all stages of a rank, or one for each."""


class StepArgs(NamedTuple):
    """The arguments of a call of `step` or `evaluate`."""

    arguments: Arguments  # of the first stage; on other ranks they may be empty
    target: Any  # [N, ...], or None
    loss_fn: LossFunction | None  # None where the last stage returns the loss
    stage_inputs: Mapping[int, Mapping[str, Any]]  # by stage, further arguments by keyword
    optimizer: Optimizers | None = None  # None leaves stepping to the caller
    with_output: bool = False  # of an evaluation with a loss


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
        failure = errors.failure_from_error(error, rank=rank, stage=stage, action="what it was called with")
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
    """Cuts inputs; inputs without a tensor [N, ...] go to every micro-batch."""
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


class StepStatus(NamedTuple):
    """The facts that all ranks know after a pass."""

    failed_ranks: list[int]
    loss: Tensor | None  # the mean over the mini-batch, a scalar on this rank's device
    measured_ranks: list[int]  # where gradients are measured by micro-batch
    signatures_match: bool  # they are measured in the same way on all ranks
    steps_after_all: bool  # some rank steps its stages now that all have finished
    optimizer_steps: list[int]  # since the last pass, by rank, as `OptimizerSteps.status`


class TimedPass(NamedTuple):
    """The actions of a pass with their start and end in seconds, and when the pass began."""

    actions: list[tuple[Action, float, float]]  # by time.perf_counter
    start: float  # by time.perf_counter
    wall_clock: float  # seconds since the epoch


class StepLoop:
    """The passes of a rank: `kind` is the kind of the present one, `last` the latest one that went well."""

    def __init__(self, contract: Contract) -> None:
        self.last: TimedPass | None = None
        self._group = group = contract.group
        self._limit = contract.limit_seconds
        self.recorded_steps = OptimizerSteps()
        self._recorder = FlightRecorder(group)
        self._number = 0  # of passes
        self.kind = StepKind.STEP
        self._broken: str | None = None

    def begin(self, kind: StepKind) -> None:
        """Counts a pass. Raises ScaleDistributedError if a rank was lost in an earlier one, LaunchError in a fork."""
        if self._group.state.is_of_parent:
            raise forked_error()
        if self._broken is not None:
            raise ScaleDistributedError(
                f"the ranks of the pipeline have lost each other in an earlier step:\n{self._broken}\n"
                "End this process and start from the last checkpoint",
                step=self._number,
            )
        self._number += 1
        self.kind = kind

    def run(self, runtime: PassRuntime, device: torch.device) -> StepStatus:
        """Runs a pass, and returns its result on all ranks.

        Raises StageError on all ranks if a stage has failed, and ScaleDistributedError if a rank was lost.
        """
        steps_after_all = runtime.grads.is_measured and runtime.inputs.step_optimizer is not None
        wall_clock, start = time.time(), time.perf_counter()
        with self._together():
            runtime.run()
            if runtime.failure is not None and runtime.failure.rank_lost:
                cause, runtime.cause = runtime.cause, None
                self._raise_rank_lost(runtime.failure, cause)
            status = self._exchange_status(runtime, steps_after_all, device)
            if status.failed_ranks:
                self._abort(runtime)
            self._compare_steps(status.optimizer_steps)
        if status.measured_ranks:
            self._report_microbatch_grads(runtime, status)
        if status.steps_after_all:
            with self._together():
                if steps_after_all:
                    runtime.step_stages()
                rows = exchange([int(runtime.failure is not None)], self._group, limit_seconds=self._limit)
                if any(failed for (failed,) in rows):
                    self._abort(runtime)
        self.last = TimedPass(runtime.timed_actions, start, wall_clock)
        return status

    @contextmanager
    def _together(self, raised_by_all: type[Exception] = errors.StageError) -> Iterator[None]:
        """A context of a common operation: if a rank does not come, or leaves, no pass can follow."""
        rank = self._group.rank
        try:
            yield
        except P2PError as error:
            self._raise_rank_lost(errors.failure_from_p2p(error, rank=rank, stage=error.slot.target), error)
        except TransferError as error:
            self._raise_rank_lost(errors.failure_at_end(error, rank), error)
        except raised_by_all:
            raise
        except BaseException as error:  # The others may still wait for this rank, which has left its program.
            self._broken = self._broken or f"rank {rank} left step {self._number}: {error!r}"
            raise

    def _exchange_status(self, runtime: PassRuntime, steps_after_all: bool, device: torch.device) -> StepStatus:
        """Exchanges how the pass went; the one place where a step waits for a device."""
        runtime.merge_losses()
        failed, grads = runtime.failure is not None, runtime.grads
        # Records of other lengths, as those of a contract, are never taken for these seven integers.
        bits, dtype, flags, fingerprint = 0, -1, int(grads.is_measured) + 2 * int(steps_after_all), 0
        if runtime.loss is not None and not failed:
            loss = runtime.loss
            (bits,) = struct.unpack("<q", struct.pack("<d", float(loss)))
            dtype = _DTYPES.index(loss.dtype) if loss.dtype in _DTYPES else 0
        if grads.is_measured:
            fingerprint = zlib.crc32(repr(list(map(tuple, grads.signatures))).encode()) if grads.signatures else 0
        record = [int(failed), bits, dtype, flags, fingerprint, self.recorded_steps.status(), 0]
        rows = exchange(record, self._group, limit_seconds=self._limit)
        mean: Tensor | None = None
        for row in rows:
            if row[2] >= 0:
                (value,) = struct.unpack("<d", struct.pack("<q", row[1]))
                mean = torch.tensor(value, dtype=_DTYPES[row[2]], device=device)
                break
        return StepStatus(
            failed_ranks=[rank for rank, row in enumerate(rows) if row[0]],
            loss=mean,
            measured_ranks=[rank for rank, row in enumerate(rows) if row[3] & 1],
            signatures_match=len({row[4] for row in rows}) == 1,
            steps_after_all=any(row[3] & 2 for row in rows),
            optimizer_steps=[row[5] for row in rows],
        )

    def _compare_steps(self, statuses: Sequence[int]) -> None:
        """Raises ContractError on all ranks if optimizers that have made equal steps do so no more.

        Stages may have optimizers of their own, and some ranks none: these are not compared.
        """
        if have_diverged(statuses):
            texts = exchange_text(json.dumps(self.recorded_steps.of_part()), self._group, limit_seconds=self._limit)
            difference = describe_difference([json.loads(text) for text in texts])
            raise ContractError(f"{difference}. {_OWN_STEPS}", step=self._number, rank=self._group.rank)
        self.recorded_steps.end(statuses)

    def _report_microbatch_grads(self, runtime: PassRuntime, status: StepStatus) -> None:
        """Ends the step for those who measure gradients, once it has gone well on all ranks."""
        grads, sizes = runtime.grads, [size for _, size in sorted(runtime.chunk_sizes.items())]
        with self._together(RuntimeError):
            try:
                grads.check_holders(status.measured_ranks)
                if not status.signatures_match:
                    grads.check_signatures(self._group, self._limit)
                grads.sum_shared(len(sizes), runtime.channels.p2p)
            except RuntimeError as error:
                if runtime.stepped_stages:
                    error.add_note(_stepped_note(runtime))
                raise
        grads.end([size.weight for size in sizes])

    def _abort(self, runtime: PassRuntime) -> NoReturn:
        note = _stepped_note(runtime) if runtime.stepped_stages else ""
        # The traceback of the cause leads to the runtime: a cycle would outlive the error.
        cause, runtime.cause = runtime.cause, None
        errors.raise_on_all_ranks(runtime.failure, self._group, self._number, cause, self._limit, note)

    def _raise_rank_lost(self, failure: Failure, cause: Exception | None) -> NoReturn:
        """Raises ScaleDistributedError with each rank's last operation; no pass can follow."""
        text = f"step {self._number}: {failure.text} (in {self.kind})"
        self._recorder.events.append(text)
        self._recorder.publish()
        lines = [text, "What each rank did last:"]
        lost = cause if isinstance(cause, TransferError) else None
        lost_rank = None if lost is None else lost.gone
        lines += [f"  rank {rank}: {events}" for rank, events in self._recorder.dump_all_ranks(lost_rank).items()]
        self._broken = "\n".join([*lines, f"The process group can't be used any more: {recovery_hint()}"])
        raise ScaleDistributedError(
            self._broken,
            step=self._number,
            unit=f"stage {failure.stage}" if failure.stage >= 0 else "",
            rank=self._group.rank,
            peer=None if lost is None else lost.peer,
            op=str(self.kind),
        ) from cause


def _stepped_note(runtime: PassRuntime) -> str:
    stages = ", ".join(map(str, runtime.stepped_stages))
    return f"Stages {stages} had been stepped by then, which can't be undone: load the last checkpoint"


@contextmanager
def restore_grads_on_error(stages: Collection[Stage]) -> Iterator[None]:
    """Around a step that may raise: then gradients of stages, and of their shards in optimizers, are as before it."""
    with as_local():
        holders: dict[Tensor, None] = {}
        for stage in stages:
            holders |= dict.fromkeys(stage.module.parameters())
            holders |= dict.fromkeys(optimizer_shards(stage.module) if stage.is_wrapped else ())
        grads = [(tensor, unreduced_grad(tensor)) for tensor in holders]
        before = [(tensor, None if grad is None else grad.clone()) for tensor, grad in grads]
    try:
        yield
    except BaseException:
        for stage in stages:
            stage.discard()
        with as_local():
            for tensor, grad in before:
                set_unreduced_grad(tensor, grad)
        raise
