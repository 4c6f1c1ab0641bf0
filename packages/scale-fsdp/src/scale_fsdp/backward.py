"""A model's backward pass: when it begins, what is reduced in it and in which order, and how any pass ends.

Reductions follow each other, one at a time, each beside the backward of the next unit. At the end the ranks compare
what they did, and only then gradients become those that an optimizer sees.

A parameter that no rank has used keeps the gradient it had, none as a rule, as in plain PyTorch: Adam's momentum and
weight decay would move it on zeros. One that only some ranks have used counts as zeros on the others. Which is which no
rank can know alone; so each remembers what it reduced as zeros, and they compare at the end of the pass.

Reduced gradients are known long before the pass has ended: optimizer state on the host can have them copied there
(`on_arriving_grads`), or use them up (`on_reduced_grads(..., at_once=...)`). Every rank waits for the same reductions
in the same order, so all tell of them in one order.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core.autograd_hooks import (
    arriving_grads_wanted,
    in_backward,
    reduced_grads_wanted,
    report_arriving_grads,
    report_reduced_grads,
    used_at_once,
)
from scale_core.consistency.execution_order import Event, PassKind, unit_title
from scale_core.consistency.recovery import tell
from scale_core.uneven_inputs import current_share
from scale_fsdp.checks import check_units, describe_units
from scale_fsdp.nonfinite import NonFiniteSearch
from scale_fsdp.recovery import PassStatus, abort_message, abort_on_all_ranks, can_abort, raise_aborted
from scale_fsdp.root import Root
from scale_fsdp.unit import Unit


class ParamKey(NamedTuple):
    """A parameter, by numbers that are equal on all ranks: of its unit, of its buffer there, and its own in that."""

    unit: int
    buffer: int
    param: int


class BackwardRoot(Root):
    """The units of one model in their backward passes, and at the end of any pass.

    Args:
        units: As for `UnitContext`.

    Attributes:
        reducing: The unit whose reduction is under way.
        nonfinite: The search for infinities and NaN, where the outermost unit asks for that.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units, functools.partial(abort_message, self))
        self.reducing: Unit | None = None
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._reduced: set[Unit] = set()
        self._unused: dict[ParamKey, bool] = {}  # What was reduced as zeros, and whether it had no gradient before.
        self._in_transit: Unit | None = None  # Its reduced gradients travel on, and nobody was told of them yet.
        self._handed_out: set[Tensor] = set()
        self._is_silent = False  # This rank has failed, and only serves the others.
        group = self.contract.group
        self.nonfinite = NonFiniteSearch(group.rank) if self.outermost.options.error_if_nonfinite else None
        check_units(self.units, group)
        self.contract.agree("how the model is built and wrapped", describe_units(self.units))
        for unit in self.units:
            unit.root, unit.contract = self, self.contract

    # In the order of time.

    def begin_backward(self) -> None:
        """A gradient has arrived at one of the units, the first of a pass.

        Raises:
            RuntimeError: The forward of the outermost module has not returned; several passes in one step of `join`.
        """
        if self.entry_unit is not None:
            raise RuntimeError(
                f"a backward pass has begun inside the forward of {unit_title(self.entry_unit.name)}: take gradients "
                "after the outermost sharded module has returned, or shard only modules that are not differentiated "
                "inside of one that is called"
            )
        if current_share() is not None and not self.synchronizes:
            raise RuntimeError(
                "join() counts whole steps, and this backward pass is one of several in a step, under no_sync(): let "
                "join() yield all micro-batches of a step together, or leave no_sync() out"
            )
        self.in_backward = True
        self.reset()
        kind = "backward with reduction" if self.reduces_any else "backward"
        self.contract.begin(PassKind(kind, grad=True, training=True), new_step=False)

    def reduce(self, unit: Unit) -> None:
        """A unit's gradients are there: reduce them, and take the results of the unit before."""
        if not self.reduces(unit):
            unit.pack()
            return
        if not unit.trains:
            return
        self.announce("reduction", unit)
        self.wait_previous_reduction()
        self.reducing = unit
        self._note_unused(unit)
        unit.reduce()

    def wait_previous_reduction(self) -> None:
        """Takes the results of the reduction under way, so that its flat gradient is free before the next is filled.

        It has run beside the backward of the next unit up to that unit's first gradient, and beside all of its
        recomputation where it is checkpointed.
        """
        if self.reducing is not None:
            unit, self.reducing = self.reducing, None
            unit.wait_reduced()
            if arriving_grads_wanted() and not self._is_silent:
                self._tell_observers(unit)

    def on_recomputed(self) -> None:
        """A checkpointed unit is about to compute its gradients; the reduction before them has run beside it so far.

        Only now is the unit before it gathered, so that its parameters never stand beside the flat gradient of the
        unit behind it: at this size one of them is a tenth of the device.
        """
        self.wait_previous_reduction()
        for unit in self.next_prefetch():
            unit.gather()

    def finish(self) -> None:
        """The pass has run to its end on this rank: reduces what is left, compares, and commits.

        Raises:
            StepError: Another rank has failed.
            FloatingPointError: Something was not finite.
        """
        if self.reduces_any:
            for unit in self.units:
                if unit.is_shared and unit not in self._reduced:
                    self.reduce(unit)
            self.wait_previous_reduction()
            self._close()
            return
        fault = self.raise_if_nonfinite()
        self.contract.leave()
        for unit in self.units:
            unit.revoke_gradients() if fault else unit.commit()

    # How a pass ends.

    def leave(self, unit: Unit) -> None:
        """A unit's forward has ended; with the one that entered, so has the pass."""
        if self.entry_unit is not unit:
            return
        self.entry_unit = None
        try:
            if torch.is_grad_enabled():
                self.raise_if_nonfinite()
                self.contract.leave()
            else:
                # Compared first: where the ranks differ, what was fetched ahead may never arrive.
                self._end_checked()
                self.reshard_idle()
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """The pass has failed on this rank: give it up together with the others, or alone, and be as before it."""
        self.entry_unit = None
        self.in_backward, self._is_silent = False, True
        on_all_ranks = False
        try:
            on_all_ranks = abort_on_all_ranks(self, error)
        finally:
            if not on_all_ranks:  # The others find it when their wait ends.
                self.contract.report_failure(error)
            self.contract.history.break_off()
            if self.nonfinite is not None:
                self.nonfinite.forget()
            self.shared_error, self.starting_gathers = None, []
            self.reset()
            for unit in self.units:
                unit.discard()

    def recover(self) -> None:
        """Ends a backward pass that has failed; autograd tells nobody when one does."""
        if self.in_backward and not in_backward():
            self.abort(RuntimeError("the backward pass before this one did not come to its end"))

    def fail(self) -> None:
        """Autograd has dropped the backward pass that ran; whatever it was is being raised to the user."""
        if self.in_backward:
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            unknown = RuntimeError(f"its backward pass failed{where}, with an error that is raised there")
            self.abort(self.failure or unknown)

    def reset(self) -> None:
        """A backward pass begins, or is over, or was given up."""
        self.reducing = self.failure = self._in_transit = None
        self._reduced, self._unused, self._handed_out = set(), {}, set()
        self._is_silent = False

    def raise_if_nonfinite(self) -> FloatingPointError | None:
        """At the end of a pass in which the ranks compare nothing.

        Returns:
            What was not finite, where the others can't be told, as in the third micro-batch of the first step: it
            waits until they compare.

        Raises:
            FloatingPointError: The same, where they can.
        """
        fault = self._fault()
        if fault is not None and can_abort(self):
            raise fault
        return fault

    def _fault(self) -> FloatingPointError | None:
        return None if self.nonfinite is None else self.nonfinite.ask()

    def _end_checked(
        self, num_late: int = 0, num_unused: int = 0, fault: BaseException | None = None
    ) -> list[PassStatus]:
        """Ends the pass: all ranks compare what they did since they last compared; returns each one's status, by rank.

        Raises:
            StepError: Another rank has failed; where this one has, by `fault`, that.
        """
        rows = self.contract.close(*PassStatus(num_late, num_unused, fault is not None))
        everyone = [PassStatus(*row) for row in rows]
        if any(status.failed for status in everyone):
            raise_aborted(self, fault)
        return everyone

    def _close(self) -> None:
        """Compares the pass with the other ranks', and agrees on what only some of them have used."""
        for unit in self.units:
            self._note_late(unit)
            for buffer in unit.buffers:
                if buffer.gradient and not buffer.trains:
                    buffer.gradient.drop()  # Frozen since the forward.
        late = [
            number
            for number, unit in enumerate(self.units)
            if self.reduces(unit) and any(buffer.gradient for buffer in unit.buffers)
        ]
        everyone = self._end_checked(len(late), len(self._unused), self._fault())
        try:
            self._commit(everyone, late)
        except BaseException:  # The others have heard that all is well, and are about to use their gradients.
            self.contract.fall_behind()
            raise
        self.reset()

    def _commit(self, everyone: Sequence[PassStatus], late: Sequence[int]) -> None:
        """The pass has gone well on every rank: its gradients become those that an optimizer sees."""
        if any(status.num_late for status in everyone):
            for number in sorted({number for numbers in tell(late, self.contract) for number in numbers}):
                self.units[number].reduce()
        for unit in self.units:
            unit.commit()
        if all(status.num_unused for status in everyone):
            self._restore_unused(tell(sorted(self._unused), self.contract))
        if reduced_grads_wanted():
            params = [param for unit in self.units if self.reduces(unit) for param in unit.reduced_params()]
            report_reduced_grads([param for param in params if param not in self._handed_out])

    # Parameters that got no gradient.

    def _note_unused(self, unit: Unit) -> None:
        """The unit is about to be reduced; a second time in a pass brings only what came late."""
        if unit in self._reduced:
            self._note_late(unit)
            return
        self._reduced.add(unit)
        for number, buffer in enumerate(unit.buffers):
            for index in buffer.gradient.missing() if buffer.trains else ():
                had_none = buffer.exposed_of(index).grad is None
                self._unused[ParamKey(self._numbers[unit], number, index)] = had_none

    def _note_late(self, unit: Unit) -> None:
        """What has got a gradient after its unit's reduction is not unused."""
        if self._unused and unit in self._reduced:
            for number, buffer in enumerate(unit.buffers):
                for index in buffer.gradient.given():
                    self._unused.pop(ParamKey(self._numbers[unit], number, index), None)

    def _restore_unused(self, keys_by_rank: Sequence[Sequence[Sequence[int]]]) -> None:
        """Takes the zeros away again from those that no rank has used and that had no gradient before."""
        for key in set.intersection(*({ParamKey(*key) for key in keys} for keys in keys_by_rank)):
            buffer = self.units[key.unit].buffers[key.buffer]
            if self._unused[key] and not buffer.flatten:
                buffer.exposed_of(key.param).grad = None

    # Who hears of reduced gradients.

    def _tell_observers(self, unit: Unit) -> None:
        """A unit's reduction was waited for: tells of its gradients, or, where they travel on, of those before them.

        Where they go to the host, or on to the replicas, the way is long: to wait for its end now would stop the pass.
        """
        before, self._in_transit = self._in_transit, None
        if before is not None:
            self._tell_of(before)
        if any(buffer.travels_on for buffer in unit.buffers):
            self._in_transit = unit
        else:
            self._tell_of(unit)

    def _tell_of(self, unit: Unit) -> None:
        with self.contract.waiting(Event("reduction", unit.name)):
            new = [
                (buffer, param, grad)
                for buffer in unit.buffers
                if buffer.keeps_reduced
                for param, grad in buffer.set_aside(self.contract.limit_seconds)
                if param.requires_grad
            ]
        # What this rank has not used, no rank may have used: then there is no gradient, as is known in the end.
        self._note_late(unit)
        keys = (key for key in self._unused if key.unit == self._numbers[unit] and not unit.buffers[key.buffer].flatten)
        unknown = {unit.buffers[key.buffer].exposed_of(key.param) for key in keys}
        at_once = {param for _, param, _ in new if used_at_once(param) and param not in unknown}
        self._handed_out |= at_once
        for buffer in dict.fromkeys(buffer for buffer, param, _ in new if param in at_once):
            buffer.hand_out(at_once)
        if at_once:
            report_reduced_grads([param for _, param, _ in new if param in at_once])
        rest = [(param, grad) for _, param, grad in new if param.grad is None and not used_at_once(param)]
        if rest:
            report_arriving_grads([param for param, _ in rest], [grad for _, grad in rest])
