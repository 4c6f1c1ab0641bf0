"""Runs one rank's program for one pass, from the first task to the last, whatever happens.

A rank whose stage has failed goes on through its program. It computes nothing more, receives its messages, and sends
the failure in the place of everything that it owes; its receivers do the same. So every rank comes to the end of its
program, and sends always match receives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from scale_core.comm.group import Group
from scale_core.compat import NO_RANGE, profiler_runs
from scale_core.errors import TransferError
from scale_pipe.distributed import errors
from scale_pipe.distributed.gradients.data_parallel import check_all_ok
from scale_pipe.distributed.gradients.microbatch_grads import MicrobatchGrads
from scale_pipe.distributed.gradients.shared_params import SharedParams
from scale_pipe.distributed.loss import BatchLoss
from scale_pipe.distributed.message import ChunkSize, Failure, Flow, Message, Payload, Slot
from scale_pipe.distributed.p2p import P2PError
from scale_pipe.distributed.program import AverageGrads, RankChannels, Receive, Send, StepKind, SumSharedGrads
from scale_pipe.distributed.stage import OUTPUT, Stage, pack
from scale_pipe.microbatch import Arguments, Chunks, gather
from scale_pipe.schedules.action import EVERY_MICRO_BATCH, FREES, Action, Kind

LOOKAHEAD = 2  # Receives that are posted before their turn: so many tensors may arrive while this rank computes.

_NO_SIZE = ChunkSize(0, 0, 0)
_NO_ARGUMENTS = Arguments((), {})


def _title(action: Action) -> str:
    """The name of an action in the trace of a profiler."""
    kind, stage, micro_batch = action
    return f"scale_pipe::{errors.ACTION_NAMES[kind].removeprefix('the ')} (stage {stage}, micro-batch {micro_batch})"


StepOptimizer = Callable[[int], Sequence[int]]
"""Steps a stage, and returns the stages whose parameters were updated."""


class StepInputs(NamedTuple):
    """The inputs of a rank for a pass."""

    chunk_sizes: Sequence[ChunkSize] = ()  # on the rank of the first stage; elsewhere they arrive
    arguments: Mapping[int, Chunks] = {}  # by stage of this rank, the `Arguments` in addition to received values
    loss_fn: BatchLoss | None = None  # on the rank of the last stage, where a loss is wanted
    keep_output: bool = False  # on the rank of the last stage, in an evaluation
    step_optimizer: StepOptimizer | None = None  # called for each stage where the schedule steps it
    failure: Failure | None = None  # a mistake in them
    cause: Exception | None = None


class PassRuntime:
    """One pass of one rank, and the result; `failure` is None while it goes well."""

    def __init__(
        self,
        group: Group,
        kind: StepKind,
        channels: RankChannels,
        stages: Mapping[int, Stage],
        inputs: StepInputs,
        shared: SharedParams,
        grads: MicrobatchGrads,
        limit_seconds: float | None,
    ) -> None:
        self.failure: Failure | None = inputs.failure
        self.cause: Exception | None = inputs.cause  # the exception of this rank
        self.losses: dict[int, Tensor] = {}  # by micro-batch, on the rank of the last stage
        self.loss: Tensor | None = None  # their mean, a scalar
        self.output: Any = None  # of the full mini-batch, likewise, in an evaluation
        self.chunk_sizes: dict[int, ChunkSize] = dict(enumerate(inputs.chunk_sizes))  # by micro-batch
        self.stepped_stages: list[int] = []
        self.timed_actions: list[tuple[Action, float, float]] = []  # start and end in seconds of time.perf_counter
        self.channels, self.inputs, self.grads = channels, inputs, grads
        self._rank = group.rank
        self._kind = kind
        self._program = channels.programs[kind]
        self._p2p = channels.p2p
        self._stages = stages
        self._shared = shared
        self._limit = limit_seconds
        self._inbox: dict[Slot, Message] = {}
        self._outbox: dict[Slot, Message] = {}
        self._outputs: dict[int, Any] = {}
        self._last_backwards: dict[int, int] = {}  # by stage, the last micro-batch that goes backward
        self._num_posted = 0

    def run(self) -> None:
        """Runs all tasks; errors are in `failure` afterwards."""
        self._agree_on_kind()
        program = self._program
        for stage in self._stages.values():
            stage.begin(splits_backward=program.splits_backward)
        num_received, in_order = 0, self._p2p.matches_by_order
        self._post_receives(LOOKAHEAD)
        for index, task in enumerate(program.tasks):
            if isinstance(task, Receive):
                num_received += 1
                self._post_receives(num_received + LOOKAHEAD)
                if in_order and task.slot not in self._inbox:
                    self._start_tensors(task.slot)
            elif isinstance(task, Send):
                self._send(task)
            elif isinstance(task, AverageGrads):
                self._average_grads()
            elif isinstance(task, SumSharedGrads):
                self._sum_shared_grads()
            elif task.kind is Kind.STEP:
                if not self.grads.is_measured:  # Who measures gradients steps when all ranks have finished.
                    self._step(task)
            else:
                following = program.tasks[index + 1] if in_order and index + 1 < len(program.tasks) else None
                self._compute(task, following if isinstance(following, Receive) else None)
                if index in program.completed_sends:
                    self._release_sends(program.completed_sends[index])
        self._release_sends(None)
        if self._outputs and self.failure is None:
            self._merge_outputs()

    def _agree_on_kind(self) -> None:
        """Waits for the first message, before anything was sent: it carries the kind of its sender's pass.

        A rank that was called for another kind runs the program of that one, as a rank that has failed.
        """
        p2p = self._p2p
        p2p.pass_kind = p2p.received_kind = self._kind
        slot = self._program.first_receive
        if slot is None:
            return
        self._post_receives(1)
        self._inbox[slot] = self._receive(slot)
        if p2p.received_kind != self._kind:
            peer_kind, peer = StepKind(p2p.received_kind), self._program.source_ranks[slot]
            self._record(errors.mismatched_pass(self._kind, peer_kind, rank=self._rank, stage=slot.target, peer=peer))
            self._program, p2p.pass_kind = self.channels.programs[peer_kind], peer_kind

    # Transfers.

    def _post_receives(self, until: int) -> None:
        for task in self._program.receives[self._num_posted : until]:
            self._p2p.post_receive(task.slot, task.peer)
            self._num_posted += 1

    def _start_tensors(self, slot: Slot) -> None:
        try:
            self._p2p.start_tensors(slot, self._program.source_ranks[slot])
        except P2PError as error:
            self._inbox[slot] = self._lost(error, slot.target)

    def _receive(self, slot: Slot) -> Message:
        if slot in self._inbox:
            return self._inbox.pop(slot)
        peer = self._program.source_ranks[slot]
        try:
            with record_function(f"scale_pipe::wait_receive ({slot})") if profiler_runs() else NO_RANGE:
                message = self._p2p.receive(slot, peer)
        except P2PError as error:
            return self._lost(error, slot.target)
        if isinstance(message, Failure) and message.rank_lost:
            message = errors.relayed_failure(message, rank=self._rank, slot=slot, peer=peer)
        if isinstance(message, Failure):
            self._record(message)
        return message

    def _send(self, task: Send) -> None:
        slot = task.slot
        message: Message | None = self._outbox.pop(slot, None)
        if self.failure is not None:
            message = self.failure
        elif slot.flow is Flow.SHARED:
            message = self._shared.message(slot.name)
        assert message is not None
        try:
            self._p2p.send(slot, task.peer, message)
        except TypeError as error:  # A tensor that the stage has returned can't be sent; nothing was sent yet.
            self._p2p.send(slot, task.peer, self._error(error, Action(Kind.FORWARD, slot.source, slot.micro_batch)))

    def _release_sends(self, slots: Sequence[Slot] | None) -> None:
        """Frees the memory of sends that have arrived; None waits for all of them."""
        try:
            self._p2p.wait_sends() if slots is None else self._p2p.release_sends(slots)
        except P2PError as error:
            self._lost(error, error.slot.source)

    # Computation.

    def _compute(self, action: Action, following: Receive | None = None) -> None:
        """Runs one computation once its inputs are there, and keeps its outputs for their slots.

        Where messages match by order, the receive `following` it in the program starts before it: no transfer is
        between the two, so the order of transfers is the same, and a message need not wait for the computation.
        """
        arrived: dict[str, Payload] = {}
        for slot in self._program.inputs[action]:
            message = self._receive(slot)
            if isinstance(message, Payload):
                arrived[slot.name] = message
        if following is not None and following.slot not in self._inbox:
            self._p2p.start_ahead(following.slot, following.peer)
        if action.kind is Kind.FORWARD and OUTPUT in arrived:
            self.chunk_sizes[action.micro_batch] = arrived[OUTPUT].chunk_size
        chunk_size = self.chunk_sizes.get(action.micro_batch)
        results: Mapping[str, Payload] = {}
        if chunk_size is not None and self.failure is None:
            results = self._run_action(action, arrived, chunk_size)
        for slot in self._program.outputs[action]:
            message = self.failure or (_NO_SIZE if chunk_size is None else results[slot.name])
            box = self._outbox if slot in self._program.sent_slots else self._inbox
            box[slot] = message

    def _run_action(
        self, action: Action, arrived: Mapping[str, Payload], chunk_size: ChunkSize
    ) -> Mapping[str, Payload]:
        """Runs a forward or a backward, and times it; an error is in `failure` afterwards."""
        if not self._last_backwards:
            self._last_backwards = {  # There may be fewer micro-batches than the schedule has.
                stage: next(batch for batch in reversed(order) if batch < chunk_size.num_micro_batches)
                for stage, order in self._program.backward_order.items()
            }
        run = self._forward if action.kind is Kind.FORWARD else self._backward
        start = time.perf_counter()
        try:
            with record_function(_title(action)) if profiler_runs() else NO_RANGE:
                return run(action, arrived, chunk_size)
        except Exception as error:
            self._error(error, action, arrived)
            return {}
        finally:
            self.timed_actions.append((action, start, time.perf_counter()))

    def _forward(self, action: Action, arrived: Mapping[str, Payload], chunk_size: ChunkSize) -> Mapping[str, Payload]:
        _, number, micro_batch = action
        arguments = self.inputs.arguments.get(number)
        if arguments is not None and arguments.total is not None and arguments.total != chunk_size.total:
            raise ValueError(
                f"stage {number} was given inputs of {arguments.total} samples, but the mini-batch has "
                f"{chunk_size.total}: give every stage inputs of the same samples"
            )
        is_last = number == self._program.num_stages - 1
        sent, result = self._stages[number].forward(
            micro_batch,
            _NO_ARGUMENTS if arguments is None else arguments.by_micro_batch[micro_batch],
            arrived,
            chunk_size,
            reduces=self._last_backwards.get(number) == micro_batch,
            is_last=is_last,
            loss_fn=self.inputs.loss_fn if is_last else None,
        )
        if result.loss is not None:
            self.losses[micro_batch] = result.loss
        if is_last and self.inputs.keep_output:
            self._outputs[micro_batch] = result.output
        return sent

    def _backward(self, action: Action, arrived: Mapping[str, Payload], chunk_size: ChunkSize) -> Mapping[str, Payload]:
        kind, number, micro_batch = action
        stage = self._stages[number]
        device = self._p2p.device.type
        with ExitStack() as stack:
            # A backward runs in the dtypes that its forward has chosen, as it does in plain loops, outside of autocast.
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
            if self.grads.is_measured:
                stack.enter_context(self.grads.micro_batch(micro_batch, ends_stage=kind in FREES))
            if kind is Kind.WEIGHT_GRADIENT:
                stage.weight_gradients(micro_batch)
                return {}
            loss = self.losses.get(micro_batch) if number == self._program.num_stages - 1 else None
            gradients = stage.backward(
                micro_batch,
                arrived,
                None if loss is None else self._loss_grad(loss, micro_batch),
                inputs_only=kind is Kind.INPUT_GRADIENT,
                reduces=self._last_backwards.get(number) == micro_batch,
            )
        # A single gradient is packed as itself: a list would be pickled.
        trees = {name: grads[0] if len(grads) == 1 else grads for name, grads in gradients.items()}
        return {name: Payload(*pack(tree), chunk_size) for name, tree in trees.items()}

    def _loss_grad(self, loss: Tensor, micro_batch: int) -> Tensor:
        assert self.inputs.loss_fn is not None
        weight = self.inputs.loss_fn.weight(micro_batch)
        if isinstance(weight, Tensor):
            return weight.to(loss.dtype).expand_as(loss)
        return torch.full_like(loss, weight)

    # The end of a pass.

    def merge_losses(self) -> None:
        """Computes the loss of the batch, once all micro-batches have theirs."""
        if self.failure is None and self.losses and self.inputs.loss_fn is not None:
            try:
                self.loss = self.inputs.loss_fn.mean(self.losses)
            except ValueError as error:
                self._error(error, Action(Kind.FORWARD, self._program.num_stages - 1, EVERY_MICRO_BATCH))

    def _merge_outputs(self) -> None:
        """Merges the outputs of an evaluation, while a failure can still be sent to all ranks."""
        try:
            self.output = gather([self._outputs[number] for number in sorted(self._outputs)])
        except Exception as error:
            self._error(error, Action(Kind.FORWARD, self._program.num_stages - 1, EVERY_MICRO_BATCH))

    def _average_grads(self) -> None:
        """Averages the gradients of stages over their replicas, unless one of these has failed."""
        for number, stage in self._stages.items():
            if stage.wrappers is None:
                continue
            action = Action(Kind.BACKWARD, number, EVERY_MICRO_BATCH)
            for group in stage.wrappers.ddp_groups:
                try:
                    check_all_ok(group, failed=self.failure is not None, limit_seconds=self._limit)
                except RuntimeError as error:
                    self._error(error, action)
            if self.failure is None:
                try:
                    stage.wrappers.average_grads(self._limit)
                except Exception as error:
                    self._error(error, action)

    def _sum_shared_grads(self) -> None:
        """Sums the gradients of parameters that other ranks hold as well."""
        arrived = {slot: self._receive(slot) for slot in self._program.source_ranks if slot.flow is Flow.SHARED}
        payloads = {slot: message for slot, message in arrived.items() if isinstance(message, Payload)}
        wrappers = [stage.wrappers for stage in self._stages.values() if stage.wrappers is not None]
        # Replicas wait in each of these for this rank, which says so there where it has failed.
        calls: list[Callable[..., None]] = [partial(self._shared.sum_grads, payloads)]
        calls += [wrapper.reduce_deferred for wrapper in wrappers]
        for call in calls:
            try:
                call(failed=self.failure is not None, limit_seconds=self._limit)
            except Exception as error:
                self._error(error, Action(Kind.BACKWARD, min(self._stages), EVERY_MICRO_BATCH))
                if isinstance(error, TransferError):  # A replica is lost, for which the next call would wait again.
                    return

    def step_stages(self) -> None:
        """Steps all stages of this rank; errors are in `failure` afterwards."""
        for stage in self._stages:
            self._step(Action(Kind.STEP, stage, EVERY_MICRO_BATCH))

    def _step(self, action: Action) -> None:
        if self.failure is None and self.inputs.step_optimizer is not None:
            try:
                self.stepped_stages += self.inputs.step_optimizer(action.stage)
            except Exception as error:
                self._error(error, action)

    def _error(self, error: Exception, action: Action, arrived: Mapping[str, Payload] | None = None) -> Failure:
        """Records an exception of this rank."""
        kind, stage, micro_batch = action
        sources = {slot.name: slot.source for slot in self._program.inputs.get(action, ())}
        payloads = [(f"stage {sources[name]}", payload) for name, payload in (arrived or {}).items()]
        failure = errors.failure_from_error(
            error,
            rank=self._rank,
            stage=stage,
            micro_batch=micro_batch,
            action=errors.ACTION_NAMES[kind],
            arrived=payloads if kind is Kind.FORWARD else (),
        )
        self.cause = self.cause or error
        self._record(failure)
        return failure

    def _lost(self, error: P2PError, stage: int) -> Failure:
        """Records that a transfer of a stage did not complete."""
        failure = errors.failure_from_p2p(error, rank=self._rank, stage=stage)
        if self.failure is None or not self.failure.rank_lost:
            self.cause = error  # It outweighs others, as in `_record`.
        self._record(failure)
        return failure

    def _record(self, failure: Failure) -> None:
        """Keeps the first failure; a lost rank outweighs others, since nothing can go on after it."""
        if self.failure is None or (failure.rank_lost and not self.failure.rank_lost):
            self.failure = failure
