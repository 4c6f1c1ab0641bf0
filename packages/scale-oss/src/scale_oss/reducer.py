"""Backward passes: gradients on their way from each rank's own, whole, to its part of their average.

A pass is watched from the first moment at which it touches the model to its end. Under `no_sync()` its gradients join
the sums of the passes before it. Otherwise they are reduced, bucket by bucket (`one_pass`), and no optimizer sees
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
from scale_oss.grad_accumulation import Sums
from scale_oss.oss import OSS
from scale_oss.skipped_backward import LEFT_OUT, Forwards, not_alike

_ONE_WRAPPER = (
    "Where several models are trained by one backward pass, and ranks use different parameters of them, their buckets "
    "have no common order: make one module whose forward runs them all, and wrap that, "
    "ShardedDataParallel(module, [optimizer, other_optimizer])"
)


class Notes(NamedTuple):
    """What a rank says of itself at the end of a pass.

    Attributes:
        num_late: Buckets that have got gradients after their reduction.
        num_missing: Parameters that it has reduced as zeros.
        num_unmet: Forward passes to which no backward has come.
        order_is_known: It has learned in which order buckets become ready.
        failed: It has failed, and given the others zeros.
        left_out: It has done so for a pass that it did not run at all.
        brought_some: It has had gradients to reduce.
    """

    num_late: int = 0
    num_missing: int = 0
    num_unmet: int = 0
    order_is_known: bool = False
    failed: bool = False
    left_out: bool = False
    brought_some: bool = False

    def packed(self) -> tuple[int, int, int]:
        """As three integers, which is what ranks can tell each other there."""
        flags = self.order_is_known + 2 * self.failed + 4 * self.left_out + 8 * self.brought_some
        return self.num_late, self.num_missing, 16 * self.num_unmet + flags

    @staticmethod
    def unpacked(row: Sequence[int]) -> Notes:
        num_late, num_missing, rest = row
        flags = (bool(rest & bit) for bit in (1, 2, 4, 8))
        return Notes(num_late, num_missing, rest // 16, *flags)


class Pass:
    """One backward pass that reduces.

    Args:
        buckets: All of them.
        order: In which they are reduced, by number; those that have nothing to reduce, on any rank, are left out.
        contract: What the ranks have promised each other.
        in_half: Gradients of fp32 parameters travel in fp16.

    Attributes:
        ready: The buckets all of whose gradients have come, in that order.
        missing: Parameters that were reduced as zeros; whether there was no gradient of an earlier pass.
        brought_some: There were gradients to reduce.
        is_closed: The ranks have compared what they did.
    """

    def __init__(self, buckets: Sequence[Bucket], order: Sequence[int], contract: Contract, *, in_half: bool) -> None:
        self._buckets, self._contract, self._in_half = buckets, contract, in_half
        self._awaited = [{i for i, param in enumerate(each.params) if param.requires_grad} for each in buckets]
        pairs = zip(self._awaited, buckets, strict=True)
        due = [bool(awaited) or any(param.grad is not None for param in each.params) for awaited, each in pairs]
        self._to_do = [number for number in order if due[number]]
        self._is_announced = False  # The next one to do has been compared with the other ranks'.
        self._reducing: int | None = None
        self.ready: list[int] = []
        self.missing: dict[tuple[int, int], bool] = {}
        self.brought_some = False
        self.is_closed = False

    def arrived(self, number: int, index: int) -> None:
        """A gradient has come, and was packed; reduces what has waited for it."""
        awaited = self._awaited[number]
        awaited.discard(index)
        if not awaited and number not in self.ready:
            self.ready.append(number)
            while self._to_do and self._to_do[0] in self.ready:
                self._reduce_next()

    def reduce_rest(self, before: Callable[[int], None]) -> None:
        """Reduces what is left, and waits until all is done.

        Args:
            before: Called with the number of each bucket that is left, before it is reduced.
        """
        while self._to_do:
            before(self._to_do[0])
            self._reduce_next()
        self._wait()

    def _reduce_next(self) -> None:
        """Starts a reduction, after the one before it."""
        number = self._to_do[0]
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
        self.brought_some = self.brought_some or bool(bucket.gradient)
        halved = self._in_half and bucket.dtype == torch.float32
        bucket.reduce(message_tag(event), torch.float16 if halved else None)
        self._to_do.pop(0)
        self._is_announced, self._reducing = False, number
        for index in missing:
            self.missing[number, index] = index not in bucket.averaged

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
        synchronizes: Whether backward passes reduce.
        begins_step: Whether the next forward pass is the first one of a step.
        current: The pass that reduces now, or is served for the others; None outside of one.
        is_watched: Autograd is to say how the pass that runs now ends, reduced or not.
        forwards: Forward passes that wait for their backward.
        sums: What passes that were not reduced have left in `param.grad`.
    """

    def __init__(self, optimizers: Sequence[OSS], contract: Contract, *, in_half: bool) -> None:
        self.contract = contract
        self.buckets: list[Bucket] = []
        self.synchronizes = True
        self.begins_step = True
        self.current: Pass | None = None
        self.is_watched = False
        self.forwards = Forwards(self._watch)
        self.sums = Sums(self._watch)
        self._optimizers, self._in_half = optimizers, in_half
        self._hooked: set[tuple[int, int]] = set()
        self._order: list[int] = []
        self._order_is_known = False
        _live.add(self)

    # Before it.

    def prepare(self, *, in_step: bool = False) -> None:
        """Before a forward pass: ends a backward pass that has failed or was left out, and watches what trains now.

        Args:
            in_step: All ranks are about to begin that forward together.
        """
        if not in_backward():
            if self.is_watched or self.current is not None:
                self.abort(RuntimeError("the backward pass before this one did not come to its end"))
            self._make_up_for_left_out(in_step=in_step)
        for bucket in (bucket for optimizer in self._optimizers for bucket in optimizer.buckets):
            if bucket not in self.buckets:
                self._order.insert(0, len(self.buckets))  # The last first: so their gradients come, as a rule.
                self._order_is_known = False
                self.buckets.append(bucket)
        for number, bucket in enumerate(self.buckets):
            for index, param in enumerate(bucket.params):
                if param.requires_grad and (number, index) not in self._hooked:
                    self._hooked.add((number, index))
                    after_gradient(param, self._listener(number, index))
                if param.grad is not None:
                    self.sums.watch(param)

    def begin(self) -> None:
        """A pass begins that all ranks reduce together."""
        for bucket in self.buckets:
            bucket.forget_taken()
        self.current = Pass(self.buckets, self._order, self.contract, in_half=self._in_half)
        self.contract.begin(PassKind("backward", grad=True, training=True), new_step=True)

    def reduce_now(self) -> bool:
        """Reduces what passes that did not synchronize have left in `param.grad`; all ranks call it together.

        Returns:
            Whether any rank had something there.
        """
        self.prepare()
        self.begin()
        some_had_some = self._finish()
        self.begins_step = True
        return some_had_some

    # During it.

    def _watch(self) -> None:
        """The pass that runs now has come to the model."""
        if not self.is_watched:
            self.is_watched = True
            at_end_of_backward(self._has_ended, self._has_failed)

    def _listener(self, number: int, index: int) -> Callable[[Tensor], None]:
        held = weakref.ref(self)  # Autograd holds the hook, and shows nobody what its hooks hold.

        def listen(_: Tensor) -> None:
            reducer = held()
            if reducer is not None:
                reducer._gradient_has_come(number, index)

        return listen

    def _gradient_has_come(self, number: int, index: int) -> None:
        if not self.is_watched:
            self._watch()
        bucket = self.buckets[number]
        param = bucket.params[index]
        self.sums.brought[id(param)] = param
        if bucket.is_gathering:
            raise RuntimeError(
                f"'{bucket.names[index]}' was used before its update had arrived from the other ranks, since its "
                "module was read from and not called, or ran before the step: call optimizer.wait() after the step, or "
                "build ShardedDataParallel(..., overlap_gather=False)"
            )
        if not self.synchronizes:
            return
        if self.current is None:
            self._make_up_for_left_out(in_step=False)
            self.begin()
        assert self.current is not None, "a pass that has begun runs"
        bucket.gradient.pack(index)
        if id(param) in self.sums.aside and (total := self.sums.take(param)) is not None:
            param.grad = total
            bucket.gradient.pack(index)  # Adds it.
        self.current.arrived(number, index)

    # Its end.

    def _has_ended(self) -> None:
        self.is_watched = False
        if self.current is not None:
            self._finish()
            return
        self.sums.join()
        for param in (param for bucket in self.buckets for param in bucket.params if param.grad is not None):
            self.sums.watch(param)  # The next backward may come without a forward.

    def _finish(self) -> bool:
        """Ends the pass that reduces; returns whether any rank has brought gradients."""
        assert self.current is not None, "a pass that ends has begun"
        try:
            self.current.reduce_rest(self._pack_what_was_left)
            some_brought_some = self._close(self.current)
        except BaseException as error:
            self.abort(error)
            raise
        self.current = None
        return some_brought_some

    def _pack_what_was_left(self, number: int) -> None:
        """Sums of passes under `no_sync()`, of parameters that this pass has not used."""
        bucket = self.buckets[number]
        for index, param in enumerate(bucket.params):
            if param.grad is not None:
                self.sums.lend(param, copied=len(bucket.params) == 1)  # Which is not packed, but taken over.
                bucket.gradient.pack(index)

    def _close(self, current: Pass) -> bool:
        """Compares the pass with the other ranks', and hands what was reduced to the optimizers; see `_finish`."""
        late = [number for number, bucket in enumerate(self.buckets) if bucket.gradient]
        mine = Notes(
            num_late=len(late),
            num_missing=len(current.missing),
            num_unmet=self.forwards.num_unmet,
            order_is_known=self._order_is_known,
            brought_some=current.brought_some,
        )
        everyones = self._compare(current, mine)
        if any(notes.failed for notes in everyones):
            raise StepError(self._in_words(tell_reasons(None, self.contract)), step=self.contract.step)
        unmet = [notes.num_unmet for notes in everyones]
        if len(set(unmet)) > 1:
            raise StepError(not_alike(self.contract.step, unmet), step=self.contract.step)
        self.forwards.settle()
        if any(notes.num_late for notes in everyones):
            for number in sorted({number for numbers in tell(late, self.contract) for number in numbers}):
                self.buckets[number].reduce(message_tag(Event("late reduction", self.buckets[number].title)))
        for bucket in self.buckets:
            with self.contract.waiting(bucket.reduce_event):
                bucket.commit(self.contract.limit_seconds)
        self.sums.forget()
        if all(notes.num_missing for notes in everyones):
            self._restore_unused(current.missing)
        if not all(notes.order_is_known for notes in everyones):
            self._learn_order(current.ready)
        return any(notes.brought_some for notes in everyones)

    def _compare(self, current: Pass, mine: Notes) -> list[Notes]:
        """Ends a pass; returns what each rank says of itself."""
        rows = self.contract.close(*mine.packed())
        current.is_closed = True
        return [Notes.unpacked(row) for row in rows]

    def _restore_unused(self, missing: dict[tuple[int, int], bool]) -> None:
        """What no rank has used keeps the gradient that it had, none as a rule, as in plain PyTorch."""
        everyones = tell([list(key) for key in sorted(missing)], self.contract)
        nobody = set.intersection(*({(number, index) for number, index in keys} for keys in everyones))
        for (number, index), had_none in missing.items():
            if (number, index) in nobody and had_none:
                self.buckets[number].restore_unused(index)

    def _learn_order(self, ready: list[int]) -> None:
        """From now on buckets are reduced in the order in which they became ready on rank 0."""
        of_first = tell(ready, self.contract)[0]
        self._order = [*of_first, *(number for number in self._order if number not in of_first)]
        self._order_is_known = True

    # A pass that fails, here or elsewhere.

    def forward_has_failed(self, error: Exception) -> None:
        """Gives up the backward pass that can't follow now; the error is about to be raised to the user."""
        if self._can_give_up(error):
            self.abort(error)

    def _has_failed(self) -> None:
        """Autograd has dropped the backward pass that ran; whatever it was is being raised to the user."""
        if self.is_watched:
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            self.abort(RuntimeError(f"its backward pass failed{where}, with an error that is raised there"))

    def abort(self, error: BaseException) -> None:
        """Gives the pass up, together with the others where that can be, and is as before it."""
        self.is_watched = False
        try:
            if isinstance(error, StepError):
                pass  # All ranks know.
            elif self._can_give_up(error):
                self._serve(Notes(failed=True))
                error.add_note(self._in_words(tell_reasons(error, self.contract)))
            else:
                self.contract.report_failure(error)
        except ScaleDistributedError:
            pass  # The user is about to see the error of the pass; the next one says that the ranks are lost.
        finally:
            self._end()
            self.forwards.clear()
            self.sums.restore()
            self.begins_step = True
            for bucket in self.buckets:
                bucket.forget_packed()

    def _make_up_for_left_out(self, *, in_step: bool) -> None:
        """Gives up the backward passes that the others have run, or still run, and this rank has left out.

        The one that runs now keeps the gradients that it has brought already.

        Args:
            in_step: As in `Forwards.one_is_left_out`.

        Raises:
            ScaleDistributedError: The others did something else, or can't be reached.
        """
        while not self.contract.alone and self.forwards.one_is_left_out(in_step=in_step):
            try:
                if all(notes.left_out for notes in self._serve(Notes(failed=True, left_out=True))):
                    self.forwards.expect()
                else:
                    self.forwards.give_up()
                    tell(LEFT_OUT, self.contract)
            finally:
                self._end()

    def _can_give_up(self, error: BaseException) -> bool:
        """Whether the others can be told of this error where they wait for this rank."""
        if self.contract.alone or isinstance(error, TransferError | ScaleDistributedError):
            return False
        # Of two models in one backward pass one says that the ranks have lost each other; nobody waits for the other.
        if any(each.contract.is_broken and each.contract.group == self.contract.group for each in _live):
            return False
        return self.current is None or not self.current.is_closed

    def _serve(self, mine: Notes) -> list[Notes]:
        """Gives the others zeros for all that they still wait for; returns what each rank says at the end.

        Raises:
            ScaleDistributedError: The others did something else, or can't be reached.
        """
        if self.current is None:
            self.begin()
        assert self.current is not None, "a pass that has begun runs"
        for bucket in self.buckets:
            bucket.forget_packed()
        self.current.reduce_rest(lambda number: None)
        return self._compare(self.current, mine)

    def _end(self) -> None:
        """Nothing comes of the pass."""
        self.current = None
        self.contract.history.break_off()
        for bucket in self.buckets:
            bucket.reduction.abandon()

    def _in_words(self, reasons: Sequence[str]) -> str:
        what_now = (
            "Parameters and optimizer state are as before it, and so are gradients that were accumulated: call "
            "optimizer.zero_grad(), and training can go on with the next batch."
        )
        return given_up(f"pass {self.contract.step}", reasons, what_now)
