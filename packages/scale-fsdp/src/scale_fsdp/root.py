"""The order among the units of one model: whose turn it is, what is prefetched, and what stays gathered.

A pass through the model is entered by one unit (the outermost one that is called). From then on every unit announces
what it does, in order; that order is compared between ranks and, from the second pass on, foretells the next gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from scale_core.consistency.contract import StepError
from scale_core.consistency.execution_order import Event, PassKind
from scale_fsdp.unit import Unit, UnitContext


class Root(UnitContext):
    """The units of one model in their order."""

    def __init__(self, units: Sequence[Unit], abort_message: Callable[[Sequence[str]], str]) -> None:
        super().__init__(units, abort_message)
        dtypes = {(unit.precision.param_dtype, unit.precision.output_dtype) for unit in self.units}
        self._computes_in_one_dtype = len(dtypes) == 1 and dtypes.pop()[1] is None

    def enter(self, unit: Unit, method: str) -> None:
        """A forward pass begins with `unit`: that of its module or, unless it is "", another method."""
        self.entry_unit = unit
        # Another method runs other units as a rule, or the same in another order: its passes are of another kind.
        name = f"forward of {unit.name}{f' by {method}' if method else ''}"
        self.contract.begin(PassKind(name, torch.is_grad_enabled(), unit.module.training), new_step=True)
        for member in self.units:
            member.begin_forward()
            # What an earlier pass has left is gathered again: `param.data` can be written to without a trace.
            if member.is_stale or not (self.keeps_after_backward(member) or member.backward_unobserved):
                member.release()

    def announce(self, phase: str, unit: Unit) -> None:
        """A unit is about to do something in which all ranks take part.

        Raises:
            ContractError: Another rank is about to do something else.
            StepError: Another rank gives the step up.
        """
        try:
            self.contract.announce(Event(phase, unit.name))
        except StepError as error:
            self.failure = error  # In a backward pass, autograd will tell nobody what it was.
            raise

    def next_prefetch(self) -> list[Unit]:
        """The unit that the last pass of this kind gathered next, if that is known."""
        history = self.contract.history
        if history.on_course:
            for phase, name in history.order[history.position :]:
                unit = self.by_name.get(name)
                if phase in ("forward", "recomputation", "backward") and unit is not None:
                    return [unit]
        return []

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered when its forward has ended."""
        if unit.backward_unobserved or unit.kept_unsharded:
            return True
        history = self.contract.history
        order, position = history.order, history.position
        if history.on_course and position < len(order) and order[position] == Event("forward", unit.name):
            return True  # It runs again at once.
        if not torch.is_grad_enabled():
            return False
        # The entry's backward comes first: releasing it would only mean to gather it again.
        return not unit.reshard_after_forward or unit is self.entry_unit

    def keeps_after_backward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered for the next micro-batch: it was to be kept, and no optimizer step is due."""
        if unit.kept_unsharded or not unit.reshard_after_backward:
            return True
        return not (self.reduces(unit) or unit.reshard_after_forward)

    def reduces(self, unit: Unit) -> bool:
        """Whether a unit's gradients are reduced at the end of this backward pass."""
        return self.synchronizes and unit.synchronizes

    @property
    def reduces_any(self) -> bool:
        """Whether any unit's are."""
        return self.synchronizes and any(unit.synchronizes for unit in self.units)

    def casts_inputs_of(self, unit: Unit) -> bool:
        """Whether floating-point inputs take the unit's dtype: at the entry, and at every unit if dtypes vary."""
        return unit is self.entry_unit or unit is self.outermost or not self._computes_in_one_dtype

    def reshard_idle(self) -> None:
        """Nothing runs any more: frees what is not kept for the next pass, and lets shards be written to."""
        for unit in self.units:
            if not (self.keeps_after_backward(unit) or unit.backward_unobserved):
                unit.release()
            for buffer in unit.buffers:
                buffer.wait_sent()  # From now on anybody may write to the shards.
