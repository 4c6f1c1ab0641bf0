"""Reducer: averages gradients bucket by bucket in the backward pass, straight into each rank's part.

A pass begins with the first gradient and ends when autograd has finished or failed. Under `no_sync()` its gradients are
accumulated. Otherwise they are reduced in one order on all ranks, and reach the optimizer after all ranks have compared
what they did. A pass that fails on one rank is aborted on all: the failing rank reduces zeros for the rest of the
order, so that the others come to the comparison, where all raise and nothing has changed. Under `no_sync()` that is the
end of the pass that reduces the step. A backward that a rank has skipped is aborted before its next one begins.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core.autograd_hooks import after_gradient, at_end_of_backward, in_backward
from scale_core.comm.work import TransferError
from scale_core.consistency.contract import Contract, ContractError, ScaleDistributedError, StepError
from scale_core.consistency.execution_order import Event, PassKind, message_tag
from scale_core.consistency.recovery import given_up, tell, tell_reasons
from scale_oss.bucket import Bucket
from scale_oss.grad_accumulation import GradAccumulation
from scale_oss.oss import OSS
from scale_oss.skipped_backward import SKIPPED, PendingForwards, describe_unmatched

_ONE_WRAPPER = (
    "Several models in one backward pass have no common order of buckets if the ranks use different parameters. Make "
    "one module whose forward runs them all, and wrap it: ShardedDataParallel(module, [optimizer, other_optimizer])"
)


class BackwardStatus(NamedTuple):
    """One rank's status at the end of a pass, exchanged by `Contract.close`.

    Attributes:
        num_late: Buckets that got gradients after their reduction.
        num_unused: Parameters that were reduced as zeros.
        num_unmatched: Forward passes without a backward.
        order_is_rebuilt: Buckets are reduced in the order in which they became ready.
        failed: The pass failed here, and zeros were reduced for the rest.
        skipped: It failed because this rank did not run it.
        has_grads: There were gradients to reduce.
    """

    num_late: int = 0
    num_unused: int = 0
    num_unmatched: int = 0
    order_is_rebuilt: bool = False
    failed: bool = False
    skipped: bool = False
    has_grads: bool = False

    def pack(self) -> tuple[int, int, int]:
        """Returns the three integers that `Contract.close` sends."""
        flags = self.order_is_rebuilt + 2 * self.failed + 4 * self.skipped + 8 * self.has_grads
        return self.num_late, self.num_unused, 16 * self.num_unmatched + flags

    @staticmethod
    def unpack(row: Sequence[int]) -> BackwardStatus:
        num_late, num_unused, rest = row
        flags = (bool(rest & bit) for bit in (1, 2, 4, 8))
        return BackwardStatus(num_late, num_unused, rest // 16, *flags)


# The reductions of one backward pass, in an order that is the same on all ranks.
#
# A bucket is reduced when all its gradients have come and those before it are under way, beside the backward of the
# next ones. Which parameters a rank has used may depend on its data: what is missing at the end counts as zeros.


class ReductionSchedule:
    """Bucket reductions of one backward pass, in one order on all ranks; one travels at a time.

    Args:
        buckets: All buckets.
        order: Their numbers in the order of reduction. Those without a gradient on any rank are left out.
        contract: Compares the reductions between the ranks.
        in_half: Send gradients of fp32 parameters in fp16.

    Attributes:
        ready_order: The buckets whose gradients are complete, in that order.
        unused: Parameters that were reduced as zeros, and whether they had no gradient of an earlier pass.
        has_grads: There were gradients to reduce.
        is_compared: The ranks have compared the pass.
    """

    def __init__(self, buckets: Sequence[Bucket], order: Sequence[int], contract: Contract, *, in_half: bool) -> None:
        self._buckets, self._contract, self._in_half = buckets, contract, in_half
        self._pending_grads = [{i for i, param in enumerate(each.params) if param.requires_grad} for each in buckets]
        pairs = zip(self._pending_grads, buckets, strict=True)
        due = [bool(awaited) or any(param.grad is not None for param in each.params) for awaited, each in pairs]
        self._unreduced = [number for number in order if due[number]]
        self._is_announced = False  # The next reduction has been compared between the ranks.
        self._reducing: int | None = None
        self.ready_order: list[int] = []
        self.unused: dict[tuple[int, int], bool] = {}
        self.has_grads = False
        self.is_compared = False

    def mark_ready(self, number: int, index: int) -> None:
        """Counts a packed gradient; reduces its bucket, and those after it, as soon as they are ready."""
        awaited = self._pending_grads[number]
        awaited.discard(index)
        if not awaited and number not in self.ready_order:
            self.ready_order.append(number)
            while self._unreduced and self._unreduced[0] in self.ready_order:
                self._reduce_next()

    def reduce_remaining(self, before: Callable[[int], None]) -> None:
        """Reduces the remaining buckets, and waits for the last one.

        Args:
            before: Called with the number of each, before it is reduced.
        """
        while self._unreduced:
            before(self._unreduced[0])
            self._reduce_next()
        self._wait()

    def _reduce_next(self) -> None:
        """Starts the next reduction when the one before has arrived."""
        number = self._unreduced[0]
        bucket = self._buckets[number]
        event = bucket.reduce_event
        if not self._is_announced:
            try:
                self._contract.announce(event)
            except ContractError as error:
                error.add_note(_ONE_WRAPPER)
                raise
            self._is_announced = True
        self._wait()
        missing = bucket.gradient.missing()
        self.has_grads = self.has_grads or bool(bucket.gradient)
        halved = self._in_half and bucket.dtype == torch.float32
        bucket.reduce(message_tag(event), torch.float16 if halved else None)
        self._unreduced.pop(0)
        self._is_announced, self._reducing = False, number
        for index in missing:
            self.unused[number, index] = index not in bucket.averaged

    def _wait(self) -> None:
        number, self._reducing = self._reducing, None
        if number is not None:
            with self._contract.waiting(self._buckets[number].reduce_event):
                self._buckets[number].reduction.wait(self._contract.limit_seconds)


_live: weakref.WeakSet[Reducer] = weakref.WeakSet()


class Reducer:
    """Reduces the gradients of buckets in backward passes.

    Args:
        optimizers: They hold the buckets; more buckets may be added.
        contract: Compares the passes between the ranks.
        in_half: Send gradients of fp32 parameters in fp16.

    Attributes:
        buckets: By number, as they were added.
        require_backward_grad_sync: Backward passes reduce; False under `no_sync()`.
        begins_step: The next forward pass is the first of a step.
        schedule: The reductions of the pass that runs now, or is replayed; None outside of one.
        finalize_is_queued: Autograd will call `_finalize_backward` or `_on_backward_failed`.
        pending_forwards: Forward passes that wait for their backward.
        accumulation: What passes without reduction have left in `param.grad`.
    """

    def __init__(self, optimizers: Sequence[OSS], contract: Contract, *, in_half: bool) -> None:
        self.contract = contract
        self.buckets: list[Bucket] = []
        self.require_backward_grad_sync = True
        self.begins_step = True
        self.schedule: ReductionSchedule | None = None
        self.finalize_is_queued = False
        self.pending_forwards = PendingForwards(self._queue_finalize)
        self.accumulation = GradAccumulation(self._queue_finalize)
        self._optimizers, self._in_half = optimizers, in_half
        self._hooked: set[tuple[int, int]] = set()
        self._order: list[int] = []
        self._order_is_rebuilt = False
        _live.add(self)

    # Before a backward pass.

    def prepare(self, *, in_step: bool = False) -> None:
        """Before a forward pass: aborts a pass that failed or was skipped, and hooks the parameters that train now.

        Args:
            in_step: All ranks begin this forward together.
        """
        if not in_backward():
            if self.finalize_is_queued or self.schedule is not None:
                self.abort(RuntimeError("the backward pass before this one did not come to its end"))
            self._abort_skipped_backward(in_step=in_step)
        for bucket in (bucket for optimizer in self._optimizers for bucket in optimizer.buckets):
            if bucket not in self.buckets:
                self._order.insert(0, len(self.buckets))  # The last first: the usual order of gradients.
                self._order_is_rebuilt = False
                self.buckets.append(bucket)
        for number, bucket in enumerate(self.buckets):
            for index, param in enumerate(bucket.params):
                if param.requires_grad and (number, index) not in self._hooked:
                    self._hooked.add((number, index))
                    after_gradient(param, self._make_grad_hook(number, index))
                if param.grad is not None:
                    self.accumulation.watch(param)

    def begin_backward(self) -> None:
        """Begins a pass that all ranks reduce together."""
        for bucket in self.buckets:
            bucket.drop_consumed_grads()
        self.schedule = ReductionSchedule(self.buckets, self._order, self.contract, in_half=self._in_half)
        self.contract.begin(PassKind("backward", grad=True, training=True), new_step=True)

    def reduce_now(self) -> bool:
        """Reduces the gradients accumulated in `param.grad`; all ranks call it together.

        Returns:
            Whether any rank had gradients.
        """
        self.prepare()
        self.begin_backward()
        some_had_grads = self._finish()
        self.begins_step = True
        return some_had_grads

    # During the pass.

    def _queue_finalize(self) -> None:
        """At the first gradient of a pass: has autograd call back when the pass ends or fails."""
        if not self.finalize_is_queued:
            self.finalize_is_queued = True
            at_end_of_backward(self._finalize_backward, self._on_backward_failed)

    def _make_grad_hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        held = weakref.ref(self)  # Autograd's hooks are invisible to the garbage collector.

        def hook(_: Tensor) -> None:
            reducer = held()
            if reducer is not None:
                reducer._post_accumulate_grad(number, index)

        return hook

    def _post_accumulate_grad(self, number: int, index: int) -> None:
        """Packs a gradient into its bucket, where the pass reduces."""
        if not self.finalize_is_queued:
            self._queue_finalize()
        bucket = self.buckets[number]
        param = bucket.params[index]
        self.accumulation.seen[id(param)] = param
        if bucket.is_gathering:
            raise RuntimeError(
                f"'{bucket.names[index]}' was used before its update had arrived from the other ranks: its module was "
                "read without being called, or ran before the step. Call optimizer.wait() after the step, or build "
                "ShardedDataParallel(..., overlap_gather=False)"
            )
        if not self.require_backward_grad_sync:
            return
        if self.schedule is None:
            self._abort_skipped_backward(in_step=False)
            self.begin_backward()
        assert self.schedule is not None, "a pass that has begun runs"
        bucket.gradient.pack(index)
        if id(param) in self.accumulation.sums and (total := self.accumulation.pop(param)) is not None:
            param.grad = total
            bucket.gradient.pack(index)  # Adds it.
        self.schedule.mark_ready(number, index)

    # The end of the pass.

    def _finalize_backward(self) -> None:
        """Ends a pass that autograd has finished."""
        self.finalize_is_queued = False
        if self.schedule is not None:
            self._finish()
            return
        self.accumulation.merge()
        for param in (param for bucket in self.buckets for param in bucket.params if param.grad is not None):
            self.accumulation.watch(param)  # The next backward may come without a forward.

    def _finish(self) -> bool:
        """Reduces the rest, compares and commits; returns whether any rank had gradients."""
        assert self.schedule is not None, "a pass that ends has begun"
        try:
            self.schedule.reduce_remaining(self._pack_accumulated)
            some_had_grads = self._compare_and_commit(self.schedule)
        except BaseException as error:
            self.abort(error)
            raise
        self.schedule = None
        return some_had_grads

    def _pack_accumulated(self, number: int) -> None:
        """Packs accumulated gradients of parameters that got none in this pass."""
        bucket = self.buckets[number]
        for index, param in enumerate(bucket.params):
            if param.grad is not None:
                self.accumulation.lend(param, copied=len(bucket.params) == 1)  # One alone is taken over, not packed.
                bucket.gradient.pack(index)

    def _compare_and_commit(self, schedule: ReductionSchedule) -> bool:
        """Compares the pass between the ranks and adds the reduced gradients to the pieces; see `_finish`."""
        late = [number for number, bucket in enumerate(self.buckets) if bucket.gradient]
        mine = BackwardStatus(
            num_late=len(late),
            num_unused=len(schedule.unused),
            num_unmatched=self.pending_forwards.num_unmatched,
            order_is_rebuilt=self._order_is_rebuilt,
            has_grads=schedule.has_grads,
        )
        statuses = self._compare(schedule, mine)
        if any(status.failed for status in statuses):
            raise StepError(self._abort_message(tell_reasons(None, self.contract)), step=self.contract.step)
        unmatched = [status.num_unmatched for status in statuses]
        if len(set(unmatched)) > 1:
            raise StepError(describe_unmatched(self.contract.step, unmatched), step=self.contract.step)
        self.pending_forwards.reset_baseline()
        if any(status.num_late for status in statuses):
            for number in sorted({number for numbers in tell(late, self.contract) for number in numbers}):
                self.buckets[number].reduce(message_tag(Event("late reduction", self.buckets[number].title)))
        for bucket in self.buckets:
            with self.contract.waiting(bucket.reduce_event):
                bucket.commit(self.contract.limit_seconds)
        self.accumulation.clear()
        if all(status.num_unused for status in statuses):
            self._restore_unused(schedule.unused)
        if not all(status.order_is_rebuilt for status in statuses):
            self._rebuild_order(schedule.ready_order)
        return any(status.has_grads for status in statuses)

    def _compare(self, schedule: ReductionSchedule, mine: BackwardStatus) -> list[BackwardStatus]:
        """Ends the pass in the contract; returns every rank's status."""
        rows = self.contract.close(*mine.pack())
        schedule.is_compared = True
        return [BackwardStatus.unpack(row) for row in rows]

    def _restore_unused(self, unused: dict[tuple[int, int], bool]) -> None:
        """Takes the gradient of zeros away from parameters that no rank has used, as in plain PyTorch."""
        by_rank = tell([list(key) for key in sorted(unused)], self.contract)
        unused_everywhere = set.intersection(*({(number, index) for number, index in keys} for keys in by_rank))
        for (number, index), had_none in unused.items():
            if (number, index) in unused_everywhere and had_none:
                self.buckets[number].restore_unused(index)

    def _rebuild_order(self, ready: list[int]) -> None:
        """Reduces buckets from now on in the order in which they became ready on rank 0."""
        of_first = tell(ready, self.contract)[0]
        self._order = [*of_first, *(number for number in self._order if number not in of_first)]
        self._order_is_rebuilt = True

    # Coordinated abort.

    def abort_forward(self, error: Exception) -> None:
        """Aborts the backward pass that can not follow a failed forward; the caller raises the error."""
        if self._can_abort_together(error):
            self.abort(error)

    def _on_backward_failed(self) -> None:
        """Autograd has dropped the pass; its error is about to reach the user."""
        if self.finalize_is_queued:
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            self.abort(RuntimeError(f"its backward pass failed{where}, with an error that is raised there"))

    def abort(self, error: BaseException) -> None:
        """Aborts the pass, together with the other ranks where that is possible, and restores the state before it."""
        self.finalize_is_queued = False
        try:
            if isinstance(error, StepError):
                pass  # It is raised on all ranks.
            elif self._can_abort_together(error):
                self._replay(BackwardStatus(failed=True))
                error.add_note(self._abort_message(tell_reasons(error, self.contract)))
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

        Args:
            in_step: See `PendingForwards.has_skipped`.

        Raises:
            ScaleDistributedError: The others did something else, or can't be reached.
        """
        while not self.contract.alone and self.pending_forwards.has_skipped(in_step=in_step):
            try:
                if all(status.skipped for status in self._replay(BackwardStatus(failed=True, skipped=True))):
                    self.pending_forwards.accept_unmatched()
                else:
                    self.pending_forwards.drop_skipped()
                    tell(SKIPPED, self.contract)
            finally:
                self._cancel_reductions()

    def _can_abort_together(self, error: BaseException) -> bool:
        """Whether the others will come to a comparison where they can be told of this error."""
        if self.contract.alone or isinstance(error, TransferError | ScaleDistributedError):
            return False
        # Another model in the same backward pass has broken the group: nobody waits for this one.
        if any(each.contract.is_broken and each.contract.group == self.contract.group for each in _live):
            return False
        return self.schedule is None or not self.schedule.is_compared

    def _replay(self, mine: BackwardStatus) -> list[BackwardStatus]:
        """Reduces zeros for all buckets that the others still wait for; returns every rank's status.

        Raises:
            ScaleDistributedError: The others did something else, or can't be reached.
        """
        if self.schedule is None:
            self.begin_backward()
        assert self.schedule is not None, "a pass that has begun runs"
        for bucket in self.buckets:
            bucket.drop_packed_grads()
        self.schedule.reduce_remaining(lambda number: None)
        return self._compare(self.schedule, mine)

    def _cancel_reductions(self) -> None:
        """Drops the pass and its results."""
        self.schedule = None
        self.contract.history.break_off()
        for bucket in self.buckets:
            bucket.reduction.abandon()

    def _abort_message(self, reasons: Sequence[str]) -> str:
        what_now = (
            "Parameters and optimizer state are as before it, and so are gradients that were accumulated: call "
            "optimizer.zero_grad(), and training can go on with the next batch."
        )
        return given_up(f"pass {self.contract.step}", reasons, what_now)
