"""One backward pass: gradients on their way from each rank's own, whole, to its part of their average.

Buckets are reduced one beside the backward of the next, in an order that is the same on all ranks, whichever
parameters each of them has used; no optimizer sees anything of it until all ranks have come to the end.

A rank that fails knows what the others still wait for: the rest of that order. So it gives them zeros for it, and says
at the end that it has failed; then all ranks raise, and nothing has happened. One that has left out a backward pass, as
where its loss failed or a batch was skipped, does so for it before it begins another.
"""

from __future__ import annotations

import json
import traceback
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from scale_core.backward import after_gradient, in_backward, once_after_backward
from scale_core.contract import Contract, ScaleDistributedError, StepError
from scale_core.events import Event, PassKind, message_tag
from scale_core.exchange import exchange_text
from scale_core.pending import TransferError
from scale_oss.bucket import Bucket
from scale_oss.forwards import Forwards
from scale_oss.notes import LEFT_OUT, Notes, given_up, not_alike
from scale_oss.optimizer import OSS

T = TypeVar("T")


@dataclass
class _Pass:
    """What is forgotten when a backward pass ends.

    Attributes:
        awaited: By bucket, the parameters whose gradient has not come yet.
        order: The buckets that are reduced, on all ranks alike; those that are frozen are not.
        ready: The buckets all of whose gradients have come, in that order.
        started: Those whose reduction has begun: the first ones of the order.
        announced: The next one of the order has been compared with the other ranks'.
        reducing: The one under way.
        missing: Parameters that were reduced as zeros; whether there was no gradient of an earlier pass.
        is_closed: The ranks have compared what they did.
    """

    awaited: list[set[int]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    announced: bool = False
    reducing: int | None = None
    missing: dict[tuple[int, int], bool] = field(default_factory=dict)
    is_closed: bool = False


class Reducer:
    """Reduces the gradients of buckets in backward passes, straight into the parts that each rank updates.

    Args:
        optimizers: Those that hold the buckets, and may get more of them.
        contract: What the ranks have promised each other.
        in_half: Gradients of fp32 parameters travel in fp16.

    Attributes:
        synchronizes: Whether backward passes reduce.
        in_backward: One that does runs now.
        forwards: Forward passes that wait for their backward.
    """

    def __init__(self, optimizers: Sequence[OSS], contract: Contract, *, in_half: bool) -> None:
        self.synchronizes = True
        self.in_backward = False
        self.forwards = Forwards()
        self._optimizers = optimizers
        self._buckets: list[Bucket] = []  # numbered as they came
        self._contract, self._in_half = contract, in_half
        self._hooked: set[tuple[int, int]] = set()
        self._order: list[int] = []
        self._order_is_known = False
        self._pass = _Pass()

    def prepare(self, *, in_step: bool = False) -> None:
        """Before a forward pass: ends a backward pass that has failed or was left out, and watches what trains now.

        Args:
            in_step: All ranks are about to begin that forward together.
        """
        if self.in_backward and not in_backward():
            self._abort(RuntimeError("the backward pass before this one did not come to its end"))
        if not in_backward():
            self._make_up_for_left_out(in_step)
        for bucket in (bucket for optimizer in self._optimizers for bucket in optimizer.buckets):
            if bucket not in self._buckets:
                self._order.insert(0, len(self._buckets))  # The last first: so their gradients come, as a rule.
                self._order_is_known = False
                self._buckets.append(bucket)
        for number, bucket in enumerate(self._buckets):
            for index, param in enumerate(bucket.params):
                if param.requires_grad and (number, index) not in self._hooked:
                    self._hooked.add((number, index))
                    after_gradient(param, self._packer(number, index))

    def reduce_now(self) -> None:
        """Reduces what passes that did not synchronize have left in `param.grad`; all ranks call it together."""
        self.prepare()
        self._begin()
        self._finish()

    # During the pass.

    def _packer(self, number: int, index: int) -> Callable[[Tensor], None]:
        held = weakref.ref(self)  # Autograd holds the hook, and shows nobody what its hooks hold.

        def pack(_: Tensor) -> None:
            reducer = held()
            if reducer is not None and reducer.synchronizes:
                reducer._pack(number, index)

        return pack

    def _pack(self, number: int, index: int) -> None:
        if not self.in_backward:
            self._make_up_for_left_out(in_step=False)
            self._begin()
            once_after_backward(_EndOfBackward(self))
        self._buckets[number].gradient.pack(index)
        awaited = self._pass.awaited[number]
        awaited.discard(index)
        if not awaited and number not in self._pass.ready:
            self._pass.ready.append(number)
            while (due := self._next()) is not None and due in self._pass.ready:
                self._reduce(due)

    def _begin(self) -> None:
        self.in_backward = True
        awaited = [{i for i, param in enumerate(bucket.params) if param.requires_grad} for bucket in self._buckets]
        due = [bool(awaited[n]) or any(p.grad is not None for p in b.params) for n, b in enumerate(self._buckets)]
        self._pass = _Pass(awaited, [number for number in self._order if due[number]])
        self._contract.begin(PassKind("backward", grad=True, training=True), new_step=True)

    def _next(self) -> int | None:
        """The bucket whose turn it is, on all ranks; None when all reductions have begun."""
        place, order = len(self._pass.started), self._pass.order
        return order[place] if place < len(order) else None

    def _reduce(self, number: int) -> None:
        """Starts a reduction, after the one before it."""
        event, bucket = _event("reduction", number), self._buckets[number]
        if not self._pass.announced:
            self._contract.announce(event)
            self._pass.announced = True
        self._wait_for_reduction()
        missing = bucket.gradient.missing()
        bucket.reduce(message_tag(event), torch.float16 if self._in_half and bucket.dtype == torch.float32 else None)
        self._pass.started.append(number)
        self._pass.announced, self._pass.reducing = False, number
        for index in missing:
            self._pass.missing[number, index] = bucket.pieces[index].grad is None

    def _wait_for_reduction(self) -> None:
        number, self._pass.reducing = self._pass.reducing, None
        if number is not None:
            with self._contract.waiting(_event("reduction", number)):
                self._buckets[number].reduction.wait(self._contract.limit_seconds)

    # Its end.

    def _finish(self) -> None:
        try:
            while (number := self._next()) is not None:
                self._pack_what_was_left(number)
                self._reduce(number)
            self._wait_for_reduction()
            self._close()
        except BaseException as error:
            self._abort(error)
            raise
        self.in_backward = False

    def _pack_what_was_left(self, number: int) -> None:
        """Gradients of passes under `no_sync()`, of parameters that this pass has not used."""
        for index in range(len(self._buckets[number].params)):
            self._buckets[number].gradient.pack(index)

    def _close(self) -> None:
        """Compares the pass with the other ranks', and hands what was reduced to the optimizers."""
        late = [number for number, bucket in enumerate(self._buckets) if bucket.gradient]
        mine = Notes(len(late), len(self._pass.missing), self.forwards.num_unmet, self._order_is_known)
        everyones = self._compare(mine)
        if any(notes.failed for notes in everyones):
            raise StepError(self._reasons(""), step=self._contract.step)
        unmet = [notes.num_unmet for notes in everyones]
        if len(set(unmet)) > 1:
            raise StepError(not_alike(self._contract.step, unmet), step=self._contract.step)
        self.forwards.settle()
        if any(notes.num_late for notes in everyones):
            for number in sorted({number for numbers in self._tell(late) for number in numbers}):
                self._buckets[number].reduce(message_tag(_event("late reduction", number)))
        for number, bucket in enumerate(self._buckets):
            with self._contract.waiting(_event("reduction", number)):
                bucket.commit(self._contract.limit_seconds)
        if all(notes.num_missing for notes in everyones):
            self._restore_unused()
        if not all(notes.order_is_known for notes in everyones):
            self._learn_order()

    def _compare(self, mine: Notes) -> list[Notes]:
        """Ends the pass; returns what each rank says of itself."""
        rows = self._contract.close(*mine.packed())
        self._pass.is_closed = True
        return [Notes.unpacked(row) for row in rows]

    def _restore_unused(self) -> None:
        """What no rank has used keeps the gradient that it had, none as a rule, as in plain PyTorch."""
        missing = self._pass.missing
        everyones = self._tell([list(key) for key in sorted(missing)])
        nobody = set.intersection(*({(number, index) for number, index in keys} for keys in everyones))
        for (number, index), had_none in missing.items():
            if (number, index) in nobody and had_none:
                self._buckets[number].pieces[index].grad = None

    def _learn_order(self) -> None:
        """From now on buckets are reduced in the order in which they became ready on rank 0."""
        ready = self._tell(self._pass.ready)[0]
        self._order = [*ready, *(number for number in self._order if number not in ready)]
        self._order_is_known = True

    def _tell(self, mine: T) -> list[T]:
        with self._contract.waiting(Event("the end", "")):
            texts = exchange_text(json.dumps(mine), self._contract.group, limit_seconds=self._contract.limit_seconds)
        return [json.loads(text) for text in texts]

    # An end before its time.

    def backward_has_failed(self) -> None:
        """Autograd has dropped the backward pass that ran; whatever it was is being raised to the user."""
        if self.in_backward:
            last = self._contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            self._abort(RuntimeError(f"its backward pass failed{where}, with an error that is raised there"))

    def forward_has_failed(self, error: Exception) -> None:
        """Gives up the backward pass that can't follow now; the error is about to be raised to the user."""
        contract = self._contract
        if contract.alone or contract.is_broken or isinstance(error, TransferError | ScaleDistributedError):
            return
        self._begin()
        self._abort(error)

    def _make_up_for_left_out(self, in_step: bool) -> None:
        """Gives up the backward passes that the others have run, or still run, and this rank has left out.

        The one that runs now keeps the gradients that it has brought already.

        Raises:
            ScaleDistributedError: The others did something else, or can't be reached.
        """
        while not self._contract.alone and self.forwards.one_is_left_out(in_step=in_step):
            self._begin()
            try:
                if all(notes.left_out for notes in self._serve(Notes(failed=True, left_out=True))):
                    self.forwards.expect()
                else:
                    self.forwards.give_up()
                    self._reasons(LEFT_OUT)
            finally:
                self.in_backward = False
                self._contract.history.break_off()
                for bucket in self._buckets:
                    bucket.reduction.abandon()

    def _abort(self, error: BaseException) -> None:
        """Gives the pass up, together with the others where that can be, and is as before it."""
        self.in_backward = False
        try:
            if not self._give_up_together(error):
                self._contract.report_failure(error)
        except ScaleDistributedError:
            pass  # What the user is about to see is the error of the pass; the next one says that the ranks are lost.
        finally:
            self._contract.history.break_off()
            self.forwards.clear()
            for bucket in self._buckets:
                bucket.gradient.drop()
                bucket.reduction.abandon()

    def _give_up_together(self, error: BaseException) -> bool:
        """Gives the others zeros for all that they still wait for, and tells them at the end that this rank failed.

        Returns:
            Whether it could.

        Raises:
            ScaleDistributedError: The others did something else, or can't be reached.
        """
        contract = self._contract
        if isinstance(error, StepError):
            return True  # All ranks know.
        if contract.alone or contract.is_broken or isinstance(error, ScaleDistributedError) or self._pass.is_closed:
            return False
        for bucket in self._buckets:
            bucket.gradient.drop()
        self._serve(Notes(failed=True))
        error.add_note(self._reasons("".join(traceback.format_exception(error)).rstrip()))
        return True

    def _serve(self, mine: Notes) -> list[Notes]:
        """Gives the others zeros for all that they still wait for; returns what each rank says at the end."""
        while (number := self._next()) is not None:
            self._reduce(number)
        self._wait_for_reduction()
        return self._compare(mine)

    def _reasons(self, mine: str) -> str:
        """All ranks tell each other why they failed, "" if they did not; returns it in words."""
        reasons = self._tell(mine)
        failed = [rank for rank, reason in enumerate(reasons) if reason]
        return given_up(self._contract.step, failed, reasons[failed[0]])


class _EndOfBackward:
    """Called by autograd when a backward pass has ended, and dropped without a call where it has failed."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer: Reducer | None = reducer

    def __call__(self) -> None:
        reducer, self._reducer = self._reducer, None
        if reducer is not None:
            reducer._finish()

    def __del__(self) -> None:
        if self._reducer is not None:
            with suppress(Exception):  # The user is about to see the error of the pass itself.
                self._reducer.backward_has_failed()


def _event(phase: str, number: int) -> Event:
    return Event(phase, f"bucket {number}")
