"""What the units of one model share: whose turn it is, what comes next, and what is still under way.

A pass through the model is entered by one unit (the outermost one that is called). From then on every unit announces
what it does, in order; that order is compared between ranks and, from the second pass on, foretells the next gather.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from scale_core.backward import in_backward, once_after_backward
from scale_core.contract import Contract
from scale_core.events import Event, PassKind, unit_title
from scale_core.exchange import exchange_text
from scale_core.group import Group
from scale_core.joining import current_share
from scale_fsdp.agreement import check_units, describe_units
from scale_fsdp.arriving import Arriving
from scale_fsdp.finite import Finite
from scale_fsdp.rescue import EndOfBackward, Notes, can_give_up, give_up_together, raise_if_given_up
from scale_fsdp.unused import Unused

if TYPE_CHECKING:  # unit.py stands on this file.
    from scale_fsdp.unit import Unit


T = TypeVar("T")


class Root:
    """The units of one model, as one of them sees them from the outside.

    Args:
        outermost: The unit whose module holds all the others.
        units: All of them, in the order of `named_modules`.

    Attributes:
        entry: The unit by which the forward pass that runs now was entered; None outside of one.
        in_backward: A backward pass runs now.
        synchronizes: Gradients are reduced at the end of a backward pass; False inside `no_sync`.
        unused: What was reduced as zeros in the backward pass that runs now.
        failure: What was raised in the recomputation of a unit in the backward pass that runs now.
        finite: What is looked for infinities and NaN, where the outermost unit asks for that.
        told: What this rank has raised that all ranks know of.
        outdated: Units have moved to another dtype, device or group since they agreed: a new root takes its place.
    """

    def __init__(self, outermost: Unit, units: Sequence[Unit]) -> None:
        self.outermost = outermost
        self.units = list(units)
        self.by_name = {unit.name: unit for unit in self.units}
        self.contract = Contract(self.group, outermost.options.limit_seconds)
        self.entry: Unit | None = None
        self.in_backward = False
        self.synchronizes = True
        self.outdated = False
        dtypes = {(unit.precision.param_dtype, unit.precision.output_dtype) for unit in self.units}
        self._computes_in_one_dtype = len(dtypes) == 1 and dtypes.pop()[1] is None
        self.unused = Unused(self.units)
        self.arriving = Arriving(self.contract, self.unused)
        self.finite = Finite(self.group.rank, outermost.options.error_if_nonfinite)
        self.failure: BaseException | None = None
        self.told: BaseException | None = None
        self._reducing: Unit | None = None
        check_units(self.units, self.group)
        self.contract.agree("how the model is built and wrapped", describe_units(self.units))
        for unit in self.units:
            unit.root = self

    @property
    def group(self) -> Group:
        """The ranks that share the model."""
        return max((unit.options.ranks.whole for unit in self.units), key=_size)

    # Forward.

    def enter(self, unit: Unit, method: str) -> None:
        """A forward pass begins with `unit`: that of its module or, unless it is "", another method."""
        self.entry = unit
        # Another method runs other units as a rule, or the same in another order: its passes are of another kind.
        name = f"forward of {unit.name}{f' by {method}' if method else ''}"
        self.contract.begin(PassKind(name, torch.is_grad_enabled(), unit.module.training), new_step=True)
        for member in self.units:
            member.follow_trainable()
            # What an earlier pass has left is gathered again: `param.data` can be written to without a trace.
            if member.is_stale or not (self.keeps_after_backward(member) or member.hidden):
                member.release()

    def leave(self, unit: Unit) -> None:
        """A unit's forward has ended; with the one that entered, so has the pass."""
        if self.entry is not unit:
            return
        self.entry = None
        try:
            if torch.is_grad_enabled():
                self._raise_if_not_finite()
                self.contract.leave()
            else:
                # Compared first: where the ranks differ, what was fetched ahead may never arrive.
                raise_if_given_up(self, self.close(Notes()), None)
                self._release_idle()
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """The pass has failed on this rank: give it up together with the others, or alone, and be as before it."""
        self.arriving.is_silent = True
        self.entry = None
        self.in_backward = False
        try:
            if not give_up_together(self, error):
                self.contract.report_failure(error)
        finally:
            self.contract.history.break_off()
            self.finite.forget()
            self.told = None
            self._forget_backward()
            for unit in self.units:
                unit.discard()

    def recover(self) -> None:
        """Ends a backward pass that has failed; autograd tells nobody when one does."""
        if self.in_backward and not in_backward():
            self.abort(RuntimeError("the backward pass before this one did not come to its end"))

    def backward_has_failed(self) -> None:
        """Autograd has dropped the backward pass that ran; whatever it was is being raised to the user."""
        if self.in_backward:
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            unknown = RuntimeError(f"its backward pass failed{where}, with an error that is raised there")
            self.abort(self.failure or unknown)

    # Backward.

    def begin_backward(self) -> None:
        """A gradient has arrived at one of the units; does nothing after the first.

        Raises:
            RuntimeError: The forward of the outermost module has not returned; several passes in one step of `join`.
        """
        if self.in_backward:
            return
        if self.entry is not None:
            raise RuntimeError(
                f"a backward pass has begun inside the forward of {unit_title(self.entry.name)}: take gradients after "
                "the outermost sharded module has returned, or shard only modules that are not differentiated inside "
                "of one that is called"
            )
        if current_share() is not None and not self.synchronizes:
            raise RuntimeError(
                "join() counts whole steps, and this backward pass is one of several in a step, under no_sync(): let "
                "join() yield all micro-batches of a step together, or leave no_sync() out"
            )
        self.in_backward = True
        self._forget_backward()
        kind = "backward with reduction" if self._reduces_any else "backward"
        self.contract.begin(PassKind(kind, grad=True, training=True), new_step=False)
        once_after_backward(EndOfBackward(self))

    def reduce(self, unit: Unit) -> None:
        """A unit's gradients are there: reduce them, and take the results of the unit before."""
        if not self.reduces(unit):
            unit.pack()
            return
        if not unit.trains:
            return
        self.announce("reduction", unit)
        self.start_reduction(unit)

    def start_reduction(self, unit: Unit) -> None:
        """Starts to reduce a unit's gradients, after the one before it."""
        self.make_room()
        self._reducing = unit
        self.unused.note_reduction(unit)
        unit.reduce()

    def make_room(self) -> None:
        """Takes the results of the reduction under way, so that its flat gradient is free before the next is filled.

        It has run beside the backward of the next unit up to that unit's first gradient, and beside all of its
        recomputation where it is checkpointed.
        """
        if self._reducing is not None:
            unit, self._reducing = self._reducing, None
            unit.wait_reduced()
            self.arriving.reduced(unit)

    def recomputed(self) -> None:
        """A checkpointed unit is about to compute its gradients; the reduction before them has run beside it so far.

        Only now is the unit before it gathered, so that its parameters never stand beside the flat gradient of the
        unit behind it: at this size one of them is a tenth of the device.
        """
        self.make_room()
        self.fetch_ahead()

    def finish_backward(self) -> None:
        try:
            for unit in self.units:
                unit.finish()
            if self._reduces_any:
                for unit in self.units:
                    if unit.lends and not self.unused.is_reduced(unit):
                        self.reduce(unit)
                self.make_room()
                self._close_backward()
            else:
                self._raise_if_not_finite()
                self.contract.leave()
                for unit in self.units:
                    unit.revoke_gradients() if self.finite.fault else unit.commit()
        except BaseException as error:
            self.abort(error)
            raise
        self.in_backward = False
        self._release_idle()

    def _close_backward(self) -> None:
        """Compares the pass with the other ranks', and agrees on what only some of them have used."""
        for unit in self.units:
            for buffer in unit.buffers:
                if buffer.gradient and not buffer.trains:
                    buffer.gradient.drop()  # Frozen since the forward.
        late = [
            number
            for number, unit in enumerate(self.units)
            if self.reduces(unit) and any(buffer.gradient for buffer in unit.buffers)
        ]
        fault = self.finite.ask()
        notes = self.close(Notes(len(late), len(self.unused.keys), fault is not None))
        raise_if_given_up(self, notes, fault)
        try:
            self._commit_backward(notes, late)
        except BaseException:  # The others have heard that all is well, and are about to use their gradients.
            self.contract.fall_behind()
            raise
        self._forget_backward()

    def _commit_backward(self, notes: Sequence[Notes], late: Sequence[int]) -> None:
        """The pass has gone well on every rank: its gradients become those that an optimizer sees."""
        if any(told.num_late for told in notes):
            for number in sorted({number for numbers in self.tell(late) for number in numbers}):
                self.units[number].reduce()
        for unit in self.units:
            unit.commit()
        if all(told.num_unused for told in notes):
            self.unused.restore(self.tell(sorted(self.unused.keys)))
        self.arriving.committed([p for unit in self.units if self.reduces(unit) for p in unit.reduced_params()])

    def close(self, notes: Notes) -> list[Notes]:
        """Compares what all ranks did since they last compared, and ends the pass; returns what each noted, by rank."""
        return [Notes(*row) for row in self.contract.close(*notes)]

    def _raise_if_not_finite(self) -> None:
        """At the end of a pass in which the ranks compare nothing.

        Where the others could not be served, as in the first step, the fault waits until they compare.

        Raises:
            FloatingPointError: Something was not finite.
        """
        fault = self.finite.ask()
        if fault is not None and can_give_up(self):
            raise fault

    def tell(self, mine: T) -> list[T]:
        """All ranks tell each other something that JSON can hold; returns what each said, by rank."""
        with self.contract.waiting(Event("the end", "")):
            limit = self.contract.limit_seconds
            return [json.loads(text) for text in exchange_text(json.dumps(mine), self.group, limit_seconds=limit)]

    def _forget_backward(self) -> None:
        self._reducing = self.failure = None
        self.unused.forget()
        self.arriving.forget()

    # What a unit asks.

    def announce(self, phase: str, unit: Unit) -> None:
        """A unit is about to do something in which all ranks take part.

        Raises:
            ContractError: Another rank is about to do something else.
        """
        self.contract.announce(Event(phase, unit.name))

    def note_output(self, unit: Unit, output: Any) -> None:
        """A unit's forward has given its output."""
        if not self.in_backward and self.contract.history.current.kind.grad:
            self.finite.note_output(unit, output)

    def note_gradient(self, unit: Unit, number: int, index: int) -> None:
        """The gradient of one parameter of a unit's buffer has come, and stands in the whole parameter's `grad`."""
        self.finite.note_gradient(unit, number, index)
        self.unused.note_gradient(unit, number, index)

    def fetch_ahead(self) -> None:
        """Starts the gather that the last pass of this kind had next; none where that unit is gathered already."""
        if not self.contract.history.on_course:
            return
        for phase, name in self.contract.history.order[self.contract.history.position :]:
            unit = self.by_name.get(name)
            if phase in ("forward", "recomputation", "backward") and unit is not None:
                unit.gather()
                return

    def reduces(self, unit: Unit) -> bool:
        """Whether a unit's gradients are reduced at the end of this backward pass."""
        return self.synchronizes and unit.synchronizes

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered when its forward has ended."""
        if unit.hidden or unit.pinned:
            return True
        order, position = self.contract.history.order, self.contract.history.position
        if self.contract.history.on_course and position < len(order) and order[position] == Event("forward", unit.name):
            return True  # It runs again at once.
        if not torch.is_grad_enabled():
            return False
        # The entry's backward comes first: releasing it would only mean to gather it again.
        return not unit.reshard_after_forward or unit is self.entry

    def keeps_after_backward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered for the next micro-batch: it was to be kept, and no optimizer step is due."""
        if unit.pinned or not unit.reshard_after_backward:
            return True
        return not self.reduces(unit) and not unit.reshard_after_forward

    @property
    def _reduces_any(self) -> bool:
        return any(self.reduces(unit) for unit in self.units)

    def casts_inputs_of(self, unit: Unit) -> bool:
        """Whether floating-point inputs take the unit's dtype: at the entry, and at every unit if dtypes vary."""
        return unit is self.entry or unit is self.outermost or not self._computes_in_one_dtype

    def _release_idle(self) -> None:
        for unit in self.units:
            if not (self.keeps_after_backward(unit) or unit.hidden):
                unit.release()
            for buffer in unit.buffers:
                buffer.wait_sent()  # From now on anybody may write to the shards.


def _size(group: Group) -> int:
    return group.size
