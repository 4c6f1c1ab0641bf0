"""What the units of one model share: whose turn it is, what comes next, and what is kept.

A pass through the model is entered by one unit (the outermost one that is called). From then on every unit announces
what it does, in order; that order is compared between ranks and, from the second pass on, foretells the next gather.
What the units share in a backward pass stands in `backward_pass.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from scale_core.autograd_hooks import in_backward
from scale_core.comm.group import Group
from scale_core.consistency.contract import Contract, StepError
from scale_core.consistency.execution_order import Event, PassKind, unit_title
from scale_fsdp.backward import BackwardPass
from scale_fsdp.checks import check_units, describe_units
from scale_fsdp.nonfinite import Finite
from scale_fsdp.recovery import Notes, can_give_up, give_up_together, in_words, raise_if_given_up

if TYPE_CHECKING:  # unit.py stands on this file.
    from scale_fsdp.unit import Unit


class Root:
    """The units of one model, as one of them sees them from the outside.

    Args:
        outermost: The unit whose module holds all the others.
        units: All of them, in the order of `named_modules`.

    Attributes:
        entry: The unit by which the forward pass that runs now was entered; None outside of one.
        backward: Its backward pass.
        synchronizes: Gradients are reduced at the end of a backward pass; False inside `no_sync`.
        opening: The units whose gathers begin now, as one of them opens.
        finite: What is looked for infinities and NaN, where the outermost unit asks for that.
        told: What this rank has raised that all ranks know of.
        outdated: Units have moved to another dtype, device or group since they agreed: a new root takes its place.
    """

    def __init__(self, outermost: Unit, units: Sequence[Unit]) -> None:
        self.outermost = outermost
        self.units = list(units)
        self.by_name = {unit.name: unit for unit in self.units}
        kind, number = type(outermost.module).__name__, outermost.number
        of = f"{unit_title(outermost.name)} ({kind}, number {number} in the order of fully_shard)"
        self.contract = Contract(self.group, outermost.options.limit_seconds, functools.partial(in_words, self), of)
        self.entry: Unit | None = None
        self.synchronizes = True
        self.outdated = False
        dtypes = {(unit.precision.param_dtype, unit.precision.output_dtype) for unit in self.units}
        self._computes_in_one_dtype = len(dtypes) == 1 and dtypes.pop()[1] is None
        self.backward = BackwardPass(self)
        self.finite = Finite(self.group.rank, outermost.options.error_if_nonfinite)
        self.opening: list[Unit] = []
        self.told: BaseException | None = None
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
            member.begin()
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
                self.raise_if_not_finite()
                self.contract.leave()
            else:
                # Compared first: where the ranks differ, what was fetched ahead may never arrive.
                raise_if_given_up(self, self.close(Notes()), None)
                self.release_idle()
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """The pass has failed on this rank: give it up together with the others, or alone, and be as before it."""
        self.entry = None
        self.backward.stop()
        given_up = False
        try:
            given_up = give_up_together(self, error)
        finally:
            if not given_up:  # The others find it when their wait ends.
                self.contract.report_failure(error)
            self.contract.history.break_off()
            self.finite.forget()
            self.told, self.opening = None, []
            self.backward.forget()
            for unit in self.units:
                unit.discard()

    def recover(self) -> None:
        """Ends a backward pass that has failed; autograd tells nobody when one does."""
        if self.backward.runs and not in_backward():
            self.abort(RuntimeError("the backward pass before this one did not come to its end"))

    def close(self, notes: Notes) -> list[Notes]:
        """Compares what all ranks did since they last compared, and ends the pass; returns what each noted, by rank."""
        return [Notes(*row) for row in self.contract.close(*notes)]

    def raise_if_not_finite(self) -> None:
        """At the end of a pass in which the ranks compare nothing.

        Where the others could not be told, as in the third micro-batch of the first step, it waits until they compare.

        Raises:
            FloatingPointError: Something was not finite.
        """
        fault = self.finite.ask()
        if fault is not None and can_give_up(self):
            raise fault

    # What a unit asks.

    def announce(self, phase: str, unit: Unit) -> None:
        """A unit is about to do something in which all ranks take part.

        Raises:
            ContractError: Another rank is about to do something else.
            StepError: Another rank gives the step up.
        """
        try:
            self.contract.announce(Event(phase, unit.name))
        except StepError as error:
            self.backward.failure = error  # In a backward pass, autograd will tell nobody what it was.
            raise

    def note_output(self, unit: Unit, output: Any) -> None:
        """A unit's forward has given its output."""
        if not self.backward.runs and self.contract.history.current.kind.grad:
            self.finite.note_output(unit, output)

    def fetched_ahead(self) -> list[Unit]:
        """The unit that the last pass of this kind gathered next, if that is known."""
        if not self.contract.history.on_course:
            return []
        for phase, name in self.contract.history.order[self.contract.history.position :]:
            unit = self.by_name.get(name)
            if phase in ("forward", "recomputation", "backward") and unit is not None:
                return [unit]
        return []

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
    def reduces_any(self) -> bool:
        """Whether any unit's are."""
        return any(self.reduces(unit) for unit in self.units)

    def casts_inputs_of(self, unit: Unit) -> bool:
        """Whether floating-point inputs take the unit's dtype: at the entry, and at every unit if dtypes vary."""
        return unit is self.entry or unit is self.outermost or not self._computes_in_one_dtype

    def release_idle(self) -> None:
        """Nothing runs any more: frees what is not kept for the next pass, and lets shards be written to."""
        for unit in self.units:
            if not (self.keeps_after_backward(unit) or unit.hidden):
                unit.release()
            for buffer in unit.buffers:
                buffer.wait_sent()  # From now on anybody may write to the shards.


def _size(group: Group) -> int:
    return group.size
