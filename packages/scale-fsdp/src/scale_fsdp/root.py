"""What the units of one model share: whose turn it is, what comes next, and what is still under way.

A pass through the model is entered by one unit (the outermost one that is called). From then on every unit announces
what it does, in order; that order is compared between ranks and, from the second pass on, foretells the next gather.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from scale_core.backward import in_backward, once_after_backward
from scale_core.contract import Contract
from scale_core.events import Event, PassKind, message_tag, unit_title
from scale_core.exchange import exchange_text
from scale_core.group import Group
from scale_fsdp.agreement import check_units, describe_units
from scale_fsdp.unused import ParamKey, Unused

if TYPE_CHECKING:  # unit.py stands on this file.
    from scale_fsdp.unit import Unit


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
    """

    def __init__(self, outermost: Unit, units: Sequence[Unit]) -> None:
        self.outermost = outermost
        self.units = list(units)
        self.by_name = {unit.name: unit for unit in self.units}
        self.contract = Contract(self.group, outermost.limit_seconds)
        self.entry: Unit | None = None
        self.in_backward = False
        self.synchronizes = True
        dtypes = {(unit.precision.param_dtype, unit.precision.output_dtype) for unit in self.units}
        self._computes_in_one_dtype = len(dtypes) == 1 and dtypes.pop()[1] is None
        self.unused = Unused(self.units)
        self._reducing: Unit | None = None
        check_units(self.units, self.group)
        self.contract.agree("how the model is built and wrapped", describe_units(self.units))
        for unit in self.units:
            unit.root = self

    @property
    def group(self) -> Group:
        """The ranks that share the parameters."""
        return max((buffer.group for unit in self.units for buffer in unit.buffers), key=_size, default=Group())

    # Forward.

    def enter(self, unit: Unit) -> None:
        """A forward pass begins with `unit`."""
        self.entry = unit
        kind = PassKind(f"forward of {unit.name}", torch.is_grad_enabled(), unit.module.training)
        self.contract.begin(kind, new_step=True)
        for member in self.units:
            member.follow_trainable()
            stale = any(buffer.is_stale() for buffer in member.buffers)
            # What an earlier pass has left is gathered again: `param.data` can be written to without a trace.
            if stale or not (self.keeps_after_backward(member) or member.hidden):
                member.release()

    def left(self, unit: Unit) -> None:
        """A unit's forward has ended; with the one that entered, so has the pass."""
        if self.entry is not unit:
            return
        self.entry = None
        try:
            if torch.is_grad_enabled():
                self.contract.leave()
            else:
                # Compared first: where the ranks differ, what was fetched ahead may never arrive.
                self.contract.close()
                self._release_idle()
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """The pass has failed on this rank: be as before it, and leave word for the others.

        Gradients of earlier passes that wait under `no_sync` stay, unless it was a backward pass: then part of its own
        gradients has been added to them, and both are dropped.
        """
        if self.in_backward:
            for unit in self.units:
                unit.drop_gradients()
        self.entry = None
        self.in_backward = False
        self._forget_backward()
        for unit in self.units:
            unit.discard()
        self.contract.report_failure(error)

    def recover(self) -> None:
        """Ends a backward pass that has failed; autograd tells nobody when one does."""
        if self.in_backward and not in_backward():
            self.abort(RuntimeError("the backward pass before this one did not come to its end"))

    # Backward.

    def begin_backward(self) -> None:
        """A gradient has arrived at one of the units; does nothing after the first."""
        if self.in_backward:
            return
        if self.entry is not None:
            raise RuntimeError(
                f"a backward pass has begun inside the forward of {unit_title(self.entry.name)}: take gradients after "
                "the outermost sharded module has returned, or shard only modules that are not differentiated inside "
                "of one that is called"
            )
        self.in_backward = True
        self._forget_backward()
        self.contract.begin(
            PassKind("backward with reduction" if self.synchronizes else "backward", grad=True, training=True),
            new_step=False,
        )
        once_after_backward(self._finish_backward)

    def reduce(self, unit: Unit) -> None:
        """A unit's gradients are there: reduce them, and take the results of the unit before."""
        if not self.synchronizes:
            unit.pack()
            return
        if not unit.trains:
            return
        self.announce("reduction", unit)
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
            self._reducing.settle()
            self._reducing = None

    def recomputed(self) -> None:
        """A checkpointed unit is about to compute its gradients; the reduction before them has run beside it so far.

        Only now is the unit before it gathered, so that its parameters never stand beside the flat gradient of the
        unit behind it: at this size one of them is a tenth of the device.
        """
        self.make_room()
        self.fetch_ahead()

    def _finish_backward(self) -> None:
        try:
            for unit in self.units:
                unit.finish()
            if self.synchronizes:
                for unit in self.units:
                    if unit.lends and not self.unused.is_reduced(unit):
                        self.reduce(unit)
                self.make_room()
                self._close_backward()
            else:
                self.contract.leave()
        except BaseException as error:
            self.abort(error)
            raise
        self.in_backward = False
        self._release_idle()

    def _close_backward(self) -> None:
        """Compares the pass with the other ranks', and agrees on what only some of them have used."""
        for unit in self.units:
            for buffer in unit.buffers:
                if buffer.has_gradient and not buffer.trains:
                    buffer.drop_gradient()  # Frozen since the forward.
        late = [number for number, unit in enumerate(self.units) if any(b.has_gradient for b in unit.buffers)]
        notes = self.contract.close(len(late), len(self.unused.keys))
        if any(row[0] for row in notes):
            for number in sorted({number for numbers in self._tell(late) for number in numbers}):
                self.units[number].reduce()
                self.units[number].settle()
        if all(row[1] for row in notes):
            self.unused.restore(self._tell(sorted(self.unused.keys)))
        self._forget_backward()

    def _tell(self, mine: list[int] | list[ParamKey]) -> list[list[Any]]:
        with self.contract.waiting(Event("the end", "")):
            limit = self.contract.limit_seconds
            return [json.loads(text) for text in exchange_text(json.dumps(mine), self.group, limit_seconds=limit)]

    def _forget_backward(self) -> None:
        self._reducing = None
        self.unused.forget()

    # What a unit asks.

    def announce(self, phase: str, unit: Unit) -> None:
        """A unit is about to do something in which all ranks take part.

        Raises:
            ContractError: Another rank is about to do something else.
        """
        self.contract.announce(Event(phase, unit.name))

    def tag(self, phase: str, unit: Unit, number: int) -> int:
        """The tag of the messages of one buffer."""
        return message_tag(Event(phase, f"{unit.name}#{number}"))

    def fetch_ahead(self) -> None:
        """Starts the gather that the last pass of this kind had next; none where that unit is gathered already."""
        if not self.contract.on_course:
            return
        for phase, name in self.contract.order[self.contract.position :]:
            unit = self.by_name.get(name)
            if phase in ("forward", "recomputation", "backward") and unit is not None:
                unit.gather()
                return

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered when its forward has ended."""
        order, position = self.contract.order, self.contract.position
        if self.contract.on_course and position < len(order) and order[position] == Event("forward", unit.name):
            return True  # It runs again at once.
        if unit.hidden:
            return True
        if not torch.is_grad_enabled():
            return False
        # The entry's backward comes first: releasing it would only mean to gather it again.
        return not unit.reshard_after_forward or unit is self.entry

    def keeps_after_backward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered for the next micro-batch: it was to be kept, and no optimizer step is due."""
        return not self.synchronizes and not unit.reshard_after_forward

    def casts_inputs_of(self, unit: Unit) -> bool:
        """Whether floating-point inputs take the unit's dtype: at the entry, and at every unit if dtypes vary."""
        return unit is self.entry or unit is self.outermost or not self._computes_in_one_dtype

    def _release_idle(self) -> None:
        for unit in self.units:
            if not (self.keeps_after_backward(unit) or unit.hidden):
                unit.release()


def _size(group: Group) -> int:
    return group.size
