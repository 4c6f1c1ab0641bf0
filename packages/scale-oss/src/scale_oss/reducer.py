"""Reducer: averages gradients bucket by bucket in the backward pass, straight into each rank's shard.

A pass begins with the first gradient and ends when autograd has finished or failed. Under `no_sync()` its gradients are
accumulated. Otherwise they are reduced in one order on all ranks, and reach the optimizer after all ranks have compared
their events. A pass that fails on one rank is aborted on all: the failing rank reduces zeros for the rest of the
order, so that the others come to the comparison, where all raise and nothing has changed. Under `no_sync()` that is the
end of the pass that reduces the step. A backward that a rank has skipped is aborted before its next one begins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function

from scale_core.compat import NO_RANGE, profiler_runs
from scale_core.consistency.all_ranks import all_gather_failures, all_gather_json, format_abort
from scale_core.consistency.backward_pass import BackwardPass, ParamKey, PassStatus, end_pass
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, PassKind, message_tag
from scale_core.errors import ContractError, ScaleDistributedError, StepError, TransferError
from scale_core.hooks.autograd import (
    PendingForwards,
    after_gradient,
    in_autograds_thread,
    in_backward,
    register_post_backward,
    weak_hook,
)
from scale_core.live_objects import live_objects, register_live
from scale_core.shard import as_local, on_local_tensors
from scale_core.sharded_tensor.replicated_parameter import set_unreduced_grad, unreduced_grad
from scale_core.sharded_tensor.tensor import is_sharded
from scale_oss.buckets.bucket import Bucket
from scale_oss.grad_accumulation import GradAccumulation
from scale_oss.oss import OSS

_SKIPPED = (
    "its forward pass was followed by no backward pass: an error in its loss was caught, its batch was skipped, or a "
    "forward pass of this rank alone was not under torch.no_grad()"
)
_ONE_WRAPPER = (
    "Several models in one backward pass have no common order of buckets if the ranks use different parameters. Make "
    "one module whose forward runs them all, and wrap it: ShardedDataParallel(module, [optimizer, other_optimizer])"
)


class StatusNote(NamedTuple):
    """What a rank adds to its `PassStatus` at the end of a pass."""

    num_unmatched: int = 0  # forward passes without a backward
    order_is_rebuilt: bool = False  # Buckets are reduced in the order in which they became ready.
    skipped: bool = False  # The pass has failed because this rank did not run it.
    has_grads: bool = False  # There were gradients to reduce.

    def pack(self) -> int:
        return 8 * self.num_unmatched + self.order_is_rebuilt + 2 * self.skipped + 4 * self.has_grads

    @staticmethod
    def unpack(note: int) -> StatusNote:
        return StatusNote(note // 8, bool(note & 1), bool(note & 2), bool(note & 4))


class ReductionSchedule:
    """Bucket reductions of one backward pass, in one order on all ranks; one is under way at a time.

    A bucket is reduced when all its gradients have come and those before it are under way, during the backward of the
    next ones. Which parameters a rank has used may depend on its data: a gradient that is missing at the end counts as
    zeros.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        order: Sequence[int],
        contract: Contract,
        backward_pass: BackwardPass,
        *,
        in_half: bool,
    ) -> None:
        self._buckets, self._contract, self._in_half = buckets, contract, in_half
        self._backward_pass = backward_pass
        self._pending_grads = [
            {i for i, param in enumerate(bucket.params) if param.requires_grad} for bucket in buckets
        ]
        # Gradients accumulated in frozen buckets, on some ranks or on all, are reduced when the ranks have compared.
        self._unreduced = [number for number in order if self._pending_grads[number]]
        self._is_announced = False  # The next reduction has been compared between the ranks.
        self._reducing: int | None = None
        self.ready_order: list[int] = []  # buckets whose gradients are complete
        self.frozen: list[ParamKey] = []  # parameters that were frozen with an accumulated gradient
        self.has_grads = False  # There were gradients to reduce.
        self.is_compared = False  # between the ranks

    def mark_ready(self, number: int, index: int, before: Callable[[int], None]) -> None:
        """Counts a packed gradient; reduces its bucket, and those after it, as soon as they are ready.

        `before` is called with the number of each before it is reduced.
        """
        awaited = self._pending_grads[number]
        awaited.discard(index)
        if not awaited and number not in self.ready_order:
            self.ready_order.append(number)
            while self._unreduced and self._unreduced[0] in self.ready_order:
                self._reduce_next(before)

    def reduce_remaining(self, before: Callable[[int], None]) -> None:
        """Reduces the remaining buckets and waits for the last one; `before` as in `mark_ready`."""
        while self._unreduced:
            self._reduce_next(before)
        self._wait()

    def _reduce_next(self, before: Callable[[int], None]) -> None:
        """Starts the next reduction when the one before has arrived."""
        number = self._unreduced[0]
        before(number)
        bucket = self._buckets[number]
        event = bucket.reduce_event
        if not self._is_announced:
            try:
                self._contract.record(event)
            except ContractError as error:
                error.add_note(_ONE_WRAPPER)
                raise
            self._is_announced = True
        self._wait()
        self._backward_pass.mark_reduced(number)
        self.has_grads = self.has_grads or bool(bucket.gradient)
        halved = self._in_half and bucket.dtype == torch.float32
        bucket.reduce(message_tag(event), torch.float16 if halved else None)
        self._unreduced.pop(0)
        self._is_announced, self._reducing = False, number

    def _wait(self) -> None:
        number, self._reducing = self._reducing, None
        if number is not None:
            bucket = self._buckets[number]
            with record_function(f"scale_oss::wait_reduce_scatter ({bucket.title})") if profiler_runs() else NO_RANGE:
                self._contract.wait(bucket.reduce_event, bucket.reduction.wait)


class Reducer:
    """Reduces the gradients of buckets in backward passes."""

    def __init__(self, optimizers: Sequence[OSS], contract: Contract, *, in_half: bool) -> None:
        self.contract = contract
        self.buckets: list[Bucket] = []
        self.require_backward_grad_sync = True  # False under `no_sync()`
        self.begins_step = True  # The next forward pass is the first of a step.
        self.schedule: ReductionSchedule | None = None  # of the pass that runs now, or is replayed
        self._backward_pass = BackwardPass(contract, self.buckets, self._abort_message)
        self.finalize_is_queued = False  # Autograd will call `_finalize_backward` or `_on_backward_failed`.
        self.pending_forwards = PendingForwards(self._queue_finalize)
        self.accumulation = GradAccumulation(self._queue_finalize)
        self._optimizers, self._in_half = optimizers, in_half
        self._hooked: set[tuple[int, int]] = set()
        self._order: list[int] = []
        self._order_is_rebuilt = False
        register_live(Reducer, self)

    # Before a backward pass.

    def prepare(self, *, in_step: bool = False, recomputes: bool = False) -> None:
        """Before a forward pass: aborts a pass that failed or was skipped, and hooks the parameters that train now.

        All ranks begin this forward together if `in_step`; a backward pass is running if it `recomputes`.
        """
        with as_local():
            if not recomputes:
                if self.finalize_is_queued or self.schedule is not None:
                    self.abort(RuntimeError("the backward pass before this one did not come to its end"))
                self._abort_skipped_backward(in_step=in_step)
            for bucket in (bucket for optimizer in self._optimizers for bucket in optimizer.buckets):
                if bucket not in self.buckets:
                    self._order.insert(0, len(self.buckets))  # The last first: the usual order of gradients.
                    self._order_is_rebuilt = False
                    self.buckets.append(bucket)
            names: dict[int, str] = {}
            for number, bucket in enumerate(self.buckets):
                for index, param in enumerate(bucket.params):
                    if param.requires_grad != bucket.trained[index]:
                        bucket.trained[index] = param.requires_grad
                        names = names or {id(other): name for name, other in self.contract.named_params()}
                        name = names.get(id(param), bucket.names[index])
                        self.contract.note_trains(name, trains=param.requires_grad)
                    if param.requires_grad and (number, index) not in self._hooked:
                        self._hooked.add((number, index))
                        is_shard = is_sharded(param)
                        hook = self._post_accumulate_grad_of_shard if is_shard else self._post_accumulate_grad
                        after_gradient(param, weak_hook(hook, number, index))
                    if unreduced_grad(param) is not None:
                        self.accumulation.watch(param)

    def begin_backward(self) -> None:
        for bucket in self.buckets:
            bucket.drop_consumed_grads()
        self._backward_pass.reset()
        self.schedule = ReductionSchedule(
            self.buckets, self._order, self.contract, self._backward_pass, in_half=self._in_half
        )
        self.contract.begin(PassKind("backward", grad=True, training=True), new_step=True)

    @on_local_tensors
    def reduce_now(self) -> bool:
        """Reduces the gradients accumulated in `param.grad` on all ranks; returns whether any had some."""
        self.prepare(recomputes=in_backward())
        self.begin_backward()
        some_had_grads = self._finish()
        self.begins_step = True
        return some_had_grads

    # During the pass.

    def _queue_finalize(self) -> None:
        """At the first gradient of a pass: has autograd call back when the pass ends or fails."""
        if not self.finalize_is_queued:
            self.finalize_is_queued = True
            register_post_backward(self._finalize_backward, self._on_backward_failed)

    @on_local_tensors
    def _post_accumulate_grad_of_shard(self, number: int, index: int, grad: Tensor) -> None:
        """The same for a parameter that its layer divides, of whose elements this rank has its own."""
        self._post_accumulate_grad(number, index, grad)

    def _post_accumulate_grad(self, number: int, index: int, _: Tensor) -> None:
        """Packs a gradient into its bucket, where the pass reduces."""
        if not self.buckets[number].params[index].requires_grad:
            return  # Frozen since the forward, it got none; torch calls hooks all the same.
        if not self.finalize_is_queued:
            self._queue_finalize()
        bucket = self.buckets[number]
        param = bucket.params[index]
        self.accumulation.seen[id(param)] = param
        if not self.require_backward_grad_sync:
            return
        if self.schedule is None:
            self._abort_skipped_backward(in_step=False)
            self.begin_backward()
        assert self.schedule is not None, "a pass that has begun runs"
        bucket.gradient.accumulate(index)
        if id(param) in self.accumulation.sums and (total := self.accumulation.pop(param)) is not None:
            set_unreduced_grad(param, total)
            bucket.gradient.accumulate(index)  # Adds it.
        self.schedule.mark_ready(number, index, self._pack_accumulated)

    # The end of the pass.

    def _finalize_backward(self) -> None:
        """Ends a pass that autograd has finished."""
        with as_local():
            self.finalize_is_queued = False
            if self.schedule is not None:
                self._finish()
                return
            self.accumulation.merge()
            for param in (param for bucket in self.buckets for param in bucket.params):
                if unreduced_grad(param) is not None:
                    self.accumulation.watch(param)  # The next backward may come without a forward.

    def _finish(self) -> bool:
        """Reduces the rest, compares and commits; returns whether any rank had gradients."""
        assert self.schedule is not None, "a pass that ends has begun"
        try:
            self.schedule.reduce_remaining(self._pack_accumulated)
            for number in range(len(self.buckets)):
                self._pack_accumulated(number)
            some_had_grads = self._compare_and_commit(self.schedule)
        except BaseException as error:
            self.abort(error)
            raise
        self.schedule = None
        return some_had_grads

    def _pack_accumulated(self, number: int) -> None:
        """Packs accumulated gradients of parameters that got none in this pass."""
        with as_local():
            assert self.schedule is not None, "a pass that reduces has begun"
            bucket = self.buckets[number]
            for index, param in enumerate(bucket.params):
                if unreduced_grad(param) is not None:
                    # A single parameter is taken over, not packed.
                    self.accumulation.stash(param, copied=len(bucket.params) == 1)
                    bucket.gradient.accumulate(index)
                    if not param.requires_grad:
                        self.schedule.frozen.append(ParamKey(number, index))

    def _compare_and_commit(self, schedule: ReductionSchedule) -> bool:
        """Compares the pass between the ranks and adds the reduced gradients to the pieces; see `_finish`."""
        late = self._backward_pass.late_gradients(range(len(self.buckets)), schedule.frozen)
        note = StatusNote(
            num_unmatched=self.pending_forwards.num_unmatched,
            order_is_rebuilt=self._order_is_rebuilt,
            has_grads=schedule.has_grads or bool(late.buckets),
        )
        status = PassStatus(late.number, len(self._backward_pass.unused), note=note.pack())
        statuses = self._backward_pass.compare(status)
        schedule.is_compared = True
        notes = [StatusNote.unpack(rank_status.note) for rank_status in statuses]
        unmatched = [note.num_unmatched for note in notes]
        if len(set(unmatched)) > 1:
            raise StepError(
                f"pass {self.contract.step} was aborted on all ranks: the numbers of forward passes without a "
                f"backward differ, {unmatched} by rank. Skip a batch on all ranks or on none, and run a forward pass "
                "without a backward under torch.no_grad()",
                step=self.contract.step,
            )
        self.pending_forwards.reset_baseline()
        with self._backward_pass.committing():
            self._backward_pass.commit(statuses, late, self._reduce_late, self._publish)
        self.accumulation.seen = {}
        if self.accumulation.sums:
            self.accumulation.clear()
        if not all(note.order_is_rebuilt for note in notes):
            self._rebuild_order(schedule.ready_order)
        return any(note.has_grads for note in notes)

    def _reduce_late(self, number: int) -> None:
        bucket = self.buckets[number]
        bucket.reduce(message_tag(Event("late reduction", bucket.title)))
        self.contract.wait(bucket.reduce_event, bucket.reduction.wait)

    def _publish(self, frozen: Mapping[int, Sequence[int]]) -> None:
        for number, bucket in enumerate(self.buckets):
            bucket.commit(frozen.get(number, ()))

    def _rebuild_order(self, ready: list[int]) -> None:
        """Reduces buckets from now on in the order in which they became ready on rank 0."""
        of_first = all_gather_json(ready, self.contract)[0]
        self._order = [*of_first, *(number for number in self._order if number not in of_first)]
        self._order_is_rebuilt = True

    # Coordinated abort.

    def abort_forward(self, error: Exception) -> None:
        """Aborts the backward pass that can not follow a failed forward; the caller raises the error."""
        if self._can_abort_together(error):
            self.abort(error)

    def _on_backward_failed(self) -> None:
        """Autograd has dropped the pass; its error is about to reach the user."""
        if self.finalize_is_queued and not in_autograds_thread():  # There `prepare` aborts it, before the next pass.
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            self.abort(RuntimeError(f"its backward pass failed{where}, with an error that is raised there"))

    @on_local_tensors
    def abort(self, error: BaseException) -> None:
        """Aborts the pass, together with the other ranks where that is possible, and restores the state before it."""
        self.finalize_is_queued = False
        try:
            if isinstance(error, StepError):
                pass  # It is raised on all ranks.
            elif self._can_abort_together(error):
                self._replay(StatusNote())
                error.add_note(self._abort_message(all_gather_failures(error, self.contract)))
            else:
                self.contract.report_failure(error)
        except ScaleDistributedError:
            pass  # The user sees the error of the pass; the next pass says that the group is broken.
        finally:
            self._cancel_reductions()
            self.pending_forwards.clear()
            self.accumulation.rollback()
            self.begins_step = True
            for bucket in self.buckets:
                bucket.drop_packed_grads()

    def _abort_skipped_backward(self, *, in_step: bool) -> None:
        """Aborts the passes that the others run, or have run, and this rank has skipped.

        Gradients of the pass that runs now stay.
        """
        while self.contract.group.size > 1 and self.pending_forwards.has_skipped(in_step=in_step):
            try:
                if all(note.skipped for note in self._replay(StatusNote(skipped=True))):
                    self.pending_forwards.accept_baseline()
                else:
                    self.pending_forwards.drop_skipped()
                    all_gather_json(_SKIPPED, self.contract)
            finally:
                self._cancel_reductions()

    def _can_abort_together(self, error: BaseException) -> bool:
        """Whether the others will come to a comparison where they learn of this error."""
        if self.contract.is_single_rank or isinstance(error, TransferError | ScaleDistributedError):
            return False
        # Another model in the same backward pass has broken the group: no rank waits for this one.
        others: list[Reducer] = live_objects(Reducer)
        if any(reducer.contract.is_broken and reducer.contract.group == self.contract.group for reducer in others):
            return False
        return self.schedule is None or not self.schedule.is_compared

    def _replay(self, note: StatusNote) -> list[StatusNote]:
        """Reduces zeros for all buckets that the others still wait for, and reports a failure; returns all notes."""
        if self.schedule is None:
            self.begin_backward()
        assert self.schedule is not None, "a pass that has begun runs"
        for bucket in self.buckets:
            bucket.drop_packed_grads()
        self.schedule.reduce_remaining(lambda number: None)
        statuses = end_pass(self.contract, PassStatus(failed=True, note=note.pack()))
        self.schedule.is_compared = True
        return [StatusNote.unpack(status.note) for status in statuses]

    def _cancel_reductions(self) -> None:
        """Drops the pass and its results."""
        self.schedule = None
        self.contract.forget_passes()
        for bucket in self.buckets:
            bucket.reduction.cancel()

    def _abort_message(self, reasons: Sequence[str]) -> str:
        what_now = (
            "Parameters and optimizer state are as before it, and so are gradients that were accumulated. Call "
            "optimizer.zero_grad(), and training can go on with the next batch."
        )
        return format_abort(f"pass {self.contract.step}", reasons, what_now)
