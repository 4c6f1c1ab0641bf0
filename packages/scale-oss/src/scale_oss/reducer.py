"""Backward passes: gradients on their way from each rank's own, whole, to its part of their average.

A pass is watched from the first moment at which it touches the model to its end. Under `no_sync()` its gradients join
the accumulation of the passes before it. Otherwise they are reduced, bucket by bucket (`one_pass`), and no optimizer sees
anything of it until all ranks have come to the end. What happens where one does not is in `giving_up`.
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
    "Where several models are trained by one backward pass, and ranks use different parameters of them, their buckets "
    "have no common order: make one module whose forward runs them all, and wrap that, "
    "ShardedDataParallel(module, [optimizer, other_optimizer])"
)


class BackwardStatus(NamedTuple):
    """What a rank says of itself at the end of a pass.

    Attributes:
        num_late: Buckets that have got gradients after their reduction.
        num_unused: Parameters that it has reduced as zeros.
        num_unmatched: Forward passes to which no backward has come.
        order_is_rebuilt: It has learned in which order buckets become ready.
        failed: It has failed, and given the others zeros.
        skipped: It has done so for a pass that it did not run at all.
        has_grads: It has had gradients to reduce.
    """

    num_late: int = 0
    num_unused: int = 0
    num_unmatched: int = 0
    order_is_rebuilt: bool = False
    failed: bool = False
    skipped: bool = False
    has_grads: bool = False

    def pack(self) -> tuple[int, int, int]:
        """As three integers, which is what ranks can tell each other there."""
        flags = self.order_is_rebuilt + 2 * self.failed + 4 * self.skipped + 8 * self.has_grads
        return self.num_late, self.num_unused, 16 * self.num_unmatched + flags

    @staticmethod
    def unpack(row: Sequence[int]) -> BackwardStatus:
        num_late, num_unused, rest = row
        flags = (bool(rest & bit) for bit in (1, 2, 4, 8))
        return BackwardStatus(num_late, num_unused, rest // 16, *flags)


class ReductionSchedule:
    """One backward pass that reduces.

    Args:
        buckets: All of them.
        order: In which they are reduced, by number; those that have nothing to reduce, on any rank, are left out.
        contract: What the ranks have promised each other.
        in_half: Gradients of fp32 parameters travel in fp16.

    Attributes:
        ready: The buckets all of whose gradients have come, in that order.
        missing: Parameters that were reduced as zeros; whether there was no gradient of an earlier pass.
        has_grads: There were gradients to reduce.
        is_compared: The ranks have compared what they did.
    """

    def __init__(self, buckets: Sequence[Bucket], order: Sequence[int], contract: Contract, *, in_half: bool) -> None:
        self._buckets, self._contract, self._in_half = buckets, contract, in_half
        self._pending_grads = [{i for i, param in enumerate(each.params) if param.requires_grad} for each in buckets]
        pairs = zip(self._pending_grads, buckets, strict=True)
        due = [bool(awaited) or any(param.grad is not None for param in each.params) for awaited, each in pairs]
        self._unreduced = [number for number in order if due[number]]
        self._is_announced = False  # The next one to do has been compared with the other ranks'.
        self._reducing: int | None = None
        self.ready_order: list[int] = []
        self.unused: dict[tuple[int, int], bool] = {}
        self.has_grads = False
        self.is_compared = False

    def mark_ready(self, number: int, index: int) -> None:
        """A gradient has come, and was packed; reduces what has waited for it."""
        awaited = self._pending_grads[number]
        awaited.discard(index)
        if not awaited and number not in self.ready_order:
            self.ready_order.append(number)
            while self._unreduced and self._unreduced[0] in self.ready_order:
                self._reduce_next()

    def reduce_remaining(self, before: Callable[[int], None]) -> None:
        """Reduces what is left, and waits until all is done.

        Args:
            before: Called with the number of each bucket that is left, before it is reduced.
        """
        while self._unreduced:
            before(self._unreduced[0])
            self._reduce_next()
        self._wait()

    def _reduce_next(self) -> None:
        """Starts a reduction, after the one before it."""
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
    """Reduces the gradients of buckets in backward passes, straight into the parts that each rank updates.

    Args:
        optimizers: Those that hold the buckets, and may get more of them.
        contract: What the ranks have promised each other.
        in_half: Gradients of fp32 parameters travel in fp16.

    Attributes:
        contract: As given.
        buckets: Numbered as they came.
        require_backward_grad_sync: Whether backward passes reduce.
        begins_step: Whether the next forward pass is the first one of a step.
        schedule: The pass that reduces now, or is served for the others; None outside of one.
        finalize_is_queued: Autograd is to say how the pass that runs now ends, reduced or not.
        forwards: Forward passes that wait for their backward.
        accumulation: What passes that were not reduced have left in `param.grad`.
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

    # Before it.

    def prepare(self, *, in_step: bool = False) -> None:
        """Before a forward pass: ends a backward pass that has failed or was left out, and watches what trains now.

        Args:
            in_step: All ranks are about to begin that forward together.
        """
        if not in_backward():
            if self.finalize_is_queued or self.schedule is not None:
                self.abort(RuntimeError("the backward pass before this one did not come to its end"))
            self._abort_skipped_backward(in_step=in_step)
        for bucket in (bucket for optimizer in self._optimizers for bucket in optimizer.buckets):
            if bucket not in self.buckets:
                self._order.insert(0, len(self.buckets))  # The last first: so their gradients come, as a rule.
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
        """A pass begins that all ranks reduce together."""
        for bucket in self.buckets:
            bucket.drop_consumed_grads()
        self.schedule = ReductionSchedule(self.buckets, self._order, self.contract, in_half=self._in_half)
        self.contract.begin(PassKind("backward", grad=True, training=True), new_step=True)

    def reduce_now(self) -> bool:
        """Reduces what passes that did not synchronize have left in `param.grad`; all ranks call it together.

        Returns:
            Whether any rank had something there.
        """
        self.prepare()
        self.begin_backward()
        some_had_grads = self._finish()
        self.begins_step = True
        return some_had_grads

    # During it.

    def _queue_finalize(self) -> None:
        """The pass that runs now has come to the model."""
        if not self.finalize_is_queued:
            self.finalize_is_queued = True
            at_end_of_backward(self._finalize_backward, self._on_backward_failed)

    def _make_grad_hook(self, number: int, index: int) -> Callable[[Tensor], None]:
        held = weakref.ref(self)  # Autograd holds the hook, and shows nobody what its hooks hold.

        def listen(_: Tensor) -> None:
            reducer = held()
            if reducer is not None:
                reducer._post_accumulate_grad(number, index)

        return listen

    def _post_accumulate_grad(self, number: int, index: int) -> None:
        if not self.finalize_is_queued:
            self._queue_finalize()
        bucket = self.buckets[number]
        param = bucket.params[index]
        self.accumulation.seen[id(param)] = param
        if bucket.is_gathering:
            raise RuntimeError(
                f"'{bucket.names[index]}' was used before its update had arrived from the other ranks, since its "
                "module was read from and not called, or ran before the step: call optimizer.wait() after the step, or "
                "build ShardedDataParallel(..., overlap_gather=False)"
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

    # Its end.

    def _finalize_backward(self) -> None:
        self.finalize_is_queued = False
        if self.schedule is not None:
            self._finish()
            return
        self.accumulation.merge()
        for param in (param for bucket in self.buckets for param in bucket.params if param.grad is not None):
            self.accumulation.watch(param)  # The next backward may come without a forward.

    def _finish(self) -> bool:
        """Ends the pass that reduces; returns whether any rank has brought gradients."""
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
        """Sums of passes under `no_sync()`, of parameters that this pass has not used."""
        bucket = self.buckets[number]
        for index, param in enumerate(bucket.params):
            if param.grad is not None:
                self.accumulation.lend(param, copied=len(bucket.params) == 1)  # Which is not packed, but taken over.
                bucket.gradient.pack(index)

    def _compare_and_commit(self, schedule: ReductionSchedule) -> bool:
        """Compares the pass with the other ranks', and hands what was reduced to the optimizers; see `_finish`."""
        late = [number for number, bucket in enumerate(self.buckets) if bucket.gradient]
        mine = BackwardStatus(
            num_late=len(late),
            num_unused=len(schedule.unused),
            num_unmatched=self.pending_forwards.num_unmatched,
            order_is_rebuilt=self._order_is_rebuilt,
            has_grads=schedule.has_grads,
        )
        everyones = self._compare(schedule, mine)
        if any(notes.failed for notes in everyones):
            raise StepError(self._abort_message(tell_reasons(None, self.contract)), step=self.contract.step)
        unmatched = [notes.num_unmatched for notes in everyones]
        if len(set(unmatched)) > 1:
            raise StepError(describe_unmatched(self.contract.step, unmatched), step=self.contract.step)
        self.pending_forwards.reset_baseline()
        if any(notes.num_late for notes in everyones):
            for number in sorted({number for numbers in tell(late, self.contract) for number in numbers}):
                self.buckets[number].reduce(message_tag(Event("late reduction", self.buckets[number].title)))
        for bucket in self.buckets:
            with self.contract.waiting(bucket.reduce_event):
                bucket.commit(self.contract.limit_seconds)
        self.accumulation.clear()
        if all(notes.num_unused for notes in everyones):
            self._restore_unused(schedule.unused)
        if not all(notes.order_is_rebuilt for notes in everyones):
            self._rebuild_order(schedule.ready_order)
        return any(notes.has_grads for notes in everyones)

    def _compare(self, schedule: ReductionSchedule, mine: BackwardStatus) -> list[BackwardStatus]:
        """Ends a pass; returns what each rank says of itself."""
        rows = self.contract.close(*mine.pack())
        schedule.is_compared = True
        return [BackwardStatus.unpack(row) for row in rows]

    def _restore_unused(self, missing: dict[tuple[int, int], bool]) -> None:
        """What no rank has used keeps the gradient that it had, none as a rule, as in plain PyTorch."""
        everyones = tell([list(key) for key in sorted(missing)], self.contract)
        nobody = set.intersection(*({(number, index) for number, index in keys} for keys in everyones))
        for (number, index), had_none in missing.items():
            if (number, index) in nobody and had_none:
                self.buckets[number].restore_unused(index)

    def _rebuild_order(self, ready: list[int]) -> None:
        """From now on buckets are reduced in the order in which they became ready on rank 0."""
        of_first = tell(ready, self.contract)[0]
        self._order = [*of_first, *(number for number in self._order if number not in of_first)]
        self._order_is_rebuilt = True

    # A pass that fails, here or elsewhere.

    def abort_forward(self, error: Exception) -> None:
        """Gives up the backward pass that can't follow now; the error is about to be raised to the user."""
        if self._can_abort_together(error):
            self.abort(error)

    def _on_backward_failed(self) -> None:
        """Autograd has dropped the backward pass that ran; whatever it was is being raised to the user."""
        if self.finalize_is_queued:
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            self.abort(RuntimeError(f"its backward pass failed{where}, with an error that is raised there"))

    def abort(self, error: BaseException) -> None:
        """Gives the pass up, together with the others where that can be, and is as before it."""
        self.finalize_is_queued = False
        try:
            if isinstance(error, StepError):
                pass  # All ranks know.
            elif self._can_abort_together(error):
                self._replay(BackwardStatus(failed=True))
                error.add_note(self._abort_message(tell_reasons(error, self.contract)))
            else:
                self.contract.report_failure(error)
        except ScaleDistributedError:
            pass  # The user is about to see the error of the pass; the next one says that the ranks are lost.
        finally:
            self._cancel_reductions()
            self.pending_forwards.clear()
            self.accumulation.rollback()
            self.begins_step = True
            for bucket in self.buckets:
                bucket.drop_packed_grads()

    def _abort_skipped_backward(self, *, in_step: bool) -> None:
        """Gives up the backward passes that the others have run, or still run, and this rank has left out.

        The one that runs now keeps the gradients that it has brought already.

        Args:
            in_step: As in `PendingForwards.has_skipped`.

        Raises:
            ScaleDistributedError: The others did something else, or can't be reached.
        """
        while not self.contract.alone and self.pending_forwards.has_skipped(in_step=in_step):
            try:
                if all(notes.skipped for notes in self._replay(BackwardStatus(failed=True, skipped=True))):
                    self.pending_forwards.accept_unmatched()
                else:
                    self.pending_forwards.drop_skipped()
                    tell(SKIPPED, self.contract)
            finally:
                self._cancel_reductions()

    def _can_abort_together(self, error: BaseException) -> bool:
        """Whether the others can be told of this error where they wait for this rank."""
        if self.contract.alone or isinstance(error, TransferError | ScaleDistributedError):
            return False
        # Of two models in one backward pass one says that the ranks have lost each other; nobody waits for the other.
        if any(each.contract.is_broken and each.contract.group == self.contract.group for each in _live):
            return False
        return self.schedule is None or not self.schedule.is_compared

    def _replay(self, mine: BackwardStatus) -> list[BackwardStatus]:
        """Gives the others zeros for all that they still wait for; returns what each rank says at the end.

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
        """Nothing comes of the pass."""
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
