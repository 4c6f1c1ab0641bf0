"""Who hears of reduced gradients while the backward pass of other units still runs.

A unit's gradients are reduced beside the backward pass of the unit before it. When that has been waited for, they are
known, long before the pass has ended: optimizer state on the host can have them copied there (`on_arriving_grads`), or
use them up (`on_reduced_grads(..., at_once=...)`). Every rank waits for the same reductions in the same order, so all
tell of them in one order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from scale_core.autograd_hooks import arriving_grads_wanted, report_arriving_grads, report_reduced_grads, used_at_once
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event

if TYPE_CHECKING:  # unit.py stands on this file's user, root.py.
    from scale_fsdp.unit import Unit
    from scale_fsdp.unused import Unused


class Arriving:
    """What the units of one model tell of in the backward pass that runs now.

    Args:
        contract: That of the ranks that share the model.
        unused: What was reduced as zeros in the pass.

    Attributes:
        is_silent: This rank has failed, and only serves the others: nothing is told of.
    """

    def __init__(self, contract: Contract, unused: Unused) -> None:
        self._contract, self._unused = contract, unused
        self._on_their_way: Unit | None = None
        self._handed_out: set[Tensor] = set()
        self.is_silent = False

    def forget(self) -> None:
        """A pass begins, or has ended."""
        self._on_their_way, self._handed_out, self.is_silent = None, set(), False

    def reduced(self, unit: Unit) -> None:
        """A unit's reduction was waited for: tells of its gradients, or, where they travel on, of those before them.

        Where they go to the host, or on to the replicas, the way is long: to wait for its end now would stop the pass.
        """
        if self.is_silent or not arriving_grads_wanted():
            return
        before, self._on_their_way = self._on_their_way, None
        if before is not None:
            self._tell(before)
        if any(buffer.travels_on for buffer in unit.buffers):
            self._on_their_way = unit
        else:
            self._tell(unit)

    def committed(self, params: Sequence[nn.Parameter]) -> None:
        """The pass has ended well, and these have their gradients: tells of those that nobody has used up yet."""
        report_reduced_grads([param for param in params if param not in self._handed_out])

    def _tell(self, unit: Unit) -> None:
        with self._contract.waiting(Event("reduction", unit.name)):
            new = [
                (buffer, param, grad)
                for buffer in unit.buffers
                if buffer.keeps_reduced
                for param, grad in buffer.set_aside(self._contract.limit_seconds)
                if param.requires_grad
            ]
        # What this rank has not used, no rank may have used: then there is no gradient, as is known in the end.
        unknown = self._unused.params_of(unit)
        at_once = {param for _, param, _ in new if used_at_once(param) and param not in unknown}
        self._handed_out |= at_once
        for buffer in dict.fromkeys(buffer for buffer, param, _ in new if param in at_once):
            buffer.hand_out(at_once)
        if at_once:
            report_reduced_grads([param for _, param, _ in new if param in at_once])
        rest = [(param, grad) for _, param, grad in new if param.grad is None and not used_at_once(param)]
        if rest:
            report_arriving_grads([param for param, _ in rest], [grad for _, grad in rest])


def uses_gradients_at_once(units: Sequence[Unit]) -> bool:
    """Whether somebody uses gradients of these units up before a pass is over, so that it can't be taken back."""
    return any(used_at_once(param) for unit in units for buffer in unit.buffers for param in buffer.exposed)
