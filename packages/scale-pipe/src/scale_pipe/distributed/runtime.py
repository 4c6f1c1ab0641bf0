"""The list of a schedule, followed: one rank's tasks of a pass, from the first to the last, whatever happens.

A rank whose stage has failed goes on through its list. It computes nothing more, takes in what it is sent, and sends
word of the failure in the place of all that it owes; whoever receives that does the same. So every rank comes to the
end of its list, and what is sent always matches what is received.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from scale_core.comm.group import Group
from scale_core.comm.work import TransferError
from scale_pipe.distributed import errors as failures
from scale_pipe.distributed.comm.messages import Content, Failure, Message, Pass, Share, pack
from scale_pipe.distributed.comm.p2p import LinkError, Links
from scale_pipe.distributed.data_parallel import agree_to_go_on
from scale_pipe.distributed.program.plan import AddShared, Average, Flow, Receive, Send, Slot
from scale_pipe.distributed.program.rank_program import Order
from scale_pipe.distributed.shared_params import Shared
from scale_pipe.distributed.stage import OUTPUT, Stage
from scale_pipe.distributed.step_inputs import Given, OnStep
from scale_pipe.microbatch import Arguments, gather
from scale_pipe.schedules.action import EVERY_MICRO_BATCH, FREES, Action, Kind

LOOKAHEAD = 2
"""How many transfers are posted before their turn: so many tensors may arrive while this rank computes."""

_NOT_THERE = Share(0, 0, 0)
_NOTHING_GIVEN = Arguments((), {})


class Run:
    """One pass of one rank.

    Args:
        group: The ranks of the pipeline.
        kind: What this rank was called for.
        orders: What it does in passes of each kind.
        stages: Its stages, by number.
        links: To the others.
        given: What it is given.
        shared: The parameters that it shares with others.
        limit_seconds: The longest wait for a replica.

    Attributes:
        failure: Why the step is given up; None while it goes well.
        cause: What was raised on this rank.
        losses: By micro-batch, on the rank of the last stage.
        output: Of the whole mini-batch, likewise, in an evaluation.
        shares: By micro-batch, those that this rank has seen.
        stepped: The stages whose parameters were updated.
        times: What was computed, when it began and when it was over, in seconds of `time.perf_counter`.
    """

    def __init__(
        self,
        group: Group,
        kind: Pass,
        orders: Mapping[Pass, Order],
        stages: Mapping[int, Stage],
        links: Links,
        given: Given,
        shared: Shared,
        limit_seconds: float | None,
    ) -> None:
        self.failure: Failure | None = given.failure
        self.cause: Exception | None = given.cause
        self.losses: dict[int, Tensor] = {}
        self.output: Any = None
        self.shares: dict[int, Share] = dict(enumerate(given.shares))
        self.stepped: list[int] = []
        self.times: list[tuple[Action, float, float]] = []
        self._rank = group.rank
        self._kind = kind
        self._orders = orders
        self._order = orders[kind]
        self._stages = stages
        self._links = links
        self._given = given
        self._shared = shared
        self._limit = limit_seconds
        self._inbox: dict[Slot, Message] = {}
        self._outbox: dict[Slot, Message] = {}
        self._outputs: dict[int, Any] = {}
        self._num_posted = 0

    def go(self) -> None:
        """Does all tasks; what goes wrong is in `failure` afterwards."""
        self._agree_on_kind()
        for stage in self._stages.values():
            stage.begin(splits=self._order.splits)
        num_received = 0
        self._post(LOOKAHEAD)
        for index, task in enumerate(self._order.tasks):
            if isinstance(task, Receive):
                num_received += 1
                self._post(num_received + LOOKAHEAD)
                if self._links.in_order and task.slot not in self._inbox:
                    self._open(task.slot)
            elif isinstance(task, Send):
                self._send(task)
            elif isinstance(task, Average):
                for number in self._stages:
                    self._average(number)
            elif isinstance(task, AddShared):
                self._add_shared()
            elif task.kind is Kind.STEP:
                self._step(task, self._given.on_step)
            else:
                self._compute(task)
                self._forget(self._order.receipts.get(index, ()))
        self._forget(None)
        self._join_outputs()

    def _agree_on_kind(self) -> None:
        """Waits for the first message, before anything was sent: it tells which pass its sender was called for.

        A rank that was called for another one goes through the list of that pass, as one that has failed.
        """
        self._links.kind = self._links.heard = self._kind
        slot = self._order.opening
        if slot is None:
            return
        self._post(1)
        self._inbox[slot] = self._take(slot)
        if self._links.heard != self._kind:
            theirs, stage, peer = Pass(self._links.heard), slot.target, self._order.peers[slot]
            self._fail(failures.of_other_pass(self._kind, theirs, rank=self._rank, stage=stage, peer=peer))
            self._order, self._links.kind = self._orders[theirs], theirs

    # Transfers.

    def _post(self, until: int) -> None:
        """Posts the receives up to this one in the order of the list."""
        for task in self._order.receives[self._num_posted : until]:
            self._links.post(task.slot, task.peer)
            self._num_posted += 1

    def _arrived(self, slot: Slot) -> Message:
        return self._inbox.pop(slot) if slot in self._inbox else self._take(slot)

    def _open(self, slot: Slot) -> None:
        """Begins to receive a slot in its turn; whoever needs it waits."""
        try:
            self._links.open(slot, self._order.peers[slot])
        except LinkError as error:
            self._inbox[slot] = failure = failures.of_link(error, rank=self._rank, stage=slot.target)
            self._fail(failure)

    def _take(self, slot: Slot) -> Message:
        peer = self._order.peers[slot]
        try:
            message = self._links.take(slot, peer)
        except LinkError as error:
            message = failures.of_link(error, rank=self._rank, stage=slot.target)
        else:
            if isinstance(message, Failure) and message.lost:
                message = failures.passed_on(message, rank=self._rank, slot=slot, peer=peer)
        if isinstance(message, Failure):
            self._fail(message)
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
            self._links.send(slot, task.peer, message)
        except TypeError as error:  # What a stage has returned has no memory of its own; nothing was sent yet.
            failure = self._raised(error, Action(Kind.FORWARD, slot.source, slot.micro_batch))
            self._links.send(slot, task.peer, failure)

    def _forget(self, slots: Sequence[Slot] | None) -> None:
        """Lets go of what has been sent and has arrived; None waits for all of it."""
        try:
            self._links.finish() if slots is None else self._links.forget(slots)
        except LinkError as error:
            self._fail(failures.of_link(error, rank=self._rank, stage=error.slot.source))

    # Computation.

    def _compute(self, action: Action) -> None:
        """One computation, once all that it needs is there; its results go to where they are needed."""
        arrived: dict[str, Content] = {}
        for slot in self._order.arriving[action]:
            message = self._arrived(slot)
            if isinstance(message, Content):
                arrived[slot.name] = message
        if action.kind is Kind.FORWARD and OUTPUT in arrived:
            self.shares[action.micro_batch] = arrived[OUTPUT].share
        share = self.shares.get(action.micro_batch)
        results: Mapping[str, Content] = {}
        if share is not None and self.failure is None:
            start = time.perf_counter()
            try:
                results = self._computed(action, arrived, share)
            except Exception as error:
                self._raised(error, action, arrived)
            self.times.append((action, start, time.perf_counter()))
        for slot in self._order.leaving[action]:
            message = self.failure or (_NOT_THERE if share is None else results[slot.name])
            box = self._outbox if slot in self._order.sent else self._inbox
            box[slot] = message

    def _computed(self, action: Action, arrived: Mapping[str, Content], share: Share) -> Mapping[str, Content]:
        kind, number, micro_batch = action
        stage = self._stages[number]
        if kind is Kind.WEIGHT_GRADIENT:
            with self._outside_autocast(), self._of_sample(action):
                stage.weight_gradients(micro_batch)
            return {}
        reduces = self._order.ends_with(number, micro_batch, share.num_micro_batches)
        if kind is Kind.FORWARD:
            given = self._given.arguments.get(number)
            if given is not None and given.total is not None and given.total != share.total:
                raise ValueError(
                    f"stage {number} was given inputs of {given.total} samples, but the mini-batch has {share.total}: "
                    "give every stage inputs of the same samples"
                )
            is_last = number == self._order.num_stages - 1
            results, kept = stage.forward(
                micro_batch,
                _NOTHING_GIVEN if given is None else given.of[micro_batch],
                arrived,
                share,
                reduces=reduces,
                is_last=is_last,
                to_loss=self._given.to_loss if is_last else None,
            )
            if kept.loss is not None:
                self.losses[micro_batch] = kept.loss
            if is_last and self._given.keeps_output:
                self._outputs[micro_batch] = kept.output
            return results
        seed = self.losses.get(micro_batch) if number == self._order.num_stages - 1 else None
        with self._outside_autocast(), self._of_sample(action):
            gradients = stage.backward(
                micro_batch,
                arrived,
                None if seed is None else torch.full_like(seed, share.weight),
                apart=kind is Kind.INPUT_GRADIENT,
                reduces=reduces,
            )
        return {name: Content(*pack(found), share) for name, found in gradients.items()}

    def _of_sample(self, action: Action) -> AbstractContextManager[object]:
        samples = self._given.samples
        return nullcontext() if samples is None else samples.of(action.micro_batch, ends_stage=action.kind in FREES)

    def _outside_autocast(self) -> AbstractContextManager[object]:
        """A backward runs in the types that its forward has chosen, as it does in plain loops, outside of autocast."""
        kind = self._links.device.type
        return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()

    # What stands at the end.

    def _join_outputs(self) -> None:
        """Puts the outputs of an evaluation together, while all ranks can still be told that they do not fit."""
        if self._outputs and self.failure is None:
            try:
                self.output = gather([self._outputs[number] for number in sorted(self._outputs)])
            except Exception as error:
                self._raised(error, Action(Kind.FORWARD, self._order.num_stages - 1, EVERY_MICRO_BATCH))

    def _average(self, number: int) -> None:
        """Averages a stage's gradients over its replicas, unless one of these has failed."""
        stage = self._stages[number]
        for group in stage.replicas.groups():
            try:
                agree_to_go_on(group, failed=self.failure is not None, limit_seconds=self._limit)
            except (RuntimeError, TransferError) as error:
                self._raised(error, Action(Kind.BACKWARD, number, EVERY_MICRO_BATCH))
        if self.failure is None:
            try:
                stage.replicas.average(self._limit)
            except Exception as error:
                self._raised(error, Action(Kind.BACKWARD, number, EVERY_MICRO_BATCH))

    def _add_shared(self) -> None:
        """Adds up the gradients of parameters that other ranks hold as well."""
        arrived = {slot: self._arrived(slot) for slot in self._order.peers if slot.flow is Flow.SHARED}
        contents = {slot: message for slot, message in arrived.items() if isinstance(message, Content)}
        try:
            self._shared.add(contents, failed=self.failure is not None, limit_seconds=self._limit)
            for stage in self._stages.values():
                stage.replicas.reduce(failed=self.failure is not None, limit_seconds=self._limit)
        except Exception as error:
            self._raised(error, Action(Kind.BACKWARD, min(self._stages), EVERY_MICRO_BATCH))

    def step_all(self, on_step: OnStep) -> None:
        """Steps all stages of this rank; what goes wrong is in `failure` afterwards."""
        for stage in self._stages:
            self._step(Action(Kind.STEP, stage, EVERY_MICRO_BATCH), on_step)

    def _step(self, action: Action, on_step: OnStep | None) -> None:
        if self.failure is None and on_step is not None:
            try:
                self.stepped += on_step(action.stage)
            except Exception as error:
                self._raised(error, action)

    def _raised(self, error: Exception, action: Action, arrived: Mapping[str, Content] | None = None) -> Failure:
        """Something was raised on this rank."""
        kind, stage, micro_batch = action
        given = []
        if kind is Kind.FORWARD and arrived:
            sources = {slot.name: slot.source for slot in self._order.arriving[action]}
            given = [(f"stage {sources[name]}", content) for name, content in arrived.items()]
        failure = failures.of_error(
            error, rank=self._rank, stage=stage, micro_batch=micro_batch, doing=failures.DOING[kind], arrived=given
        )
        self.cause = self.cause or error
        self._fail(failure)
        return failure

    def _fail(self, failure: Failure) -> None:
        """Keeps the first failure; the loss of a rank outweighs others, since nothing can go on after it."""
        if self.failure is None or (failure.lost and not self.failure.lost):
            self.failure = failure
