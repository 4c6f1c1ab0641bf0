"""Hands reduced gradients to hooks before the backward pass is over.

Reduced gradients are known long before the pass has ended. Optimizer state on the host can have them copied there
(`register_reduced_grad_hook`), or consume them (`register_grad_published_hook(..., at_once=...)`). Every rank waits
for the same reductions in the same order, so the hooks run in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor, nn

from scale_core.consistency.backward_pass import BackwardPass
from scale_core.consistency.execution_order import Event
from scale_core.hooks.gradients import (
    call_grad_published_hooks,
    call_reduced_grad_hooks,
    gradient_hooks,
    has_reduced_grad_hooks,
    is_consumed_in_backward,
)
from scale_fsdp.runtime.unit import Unit, UnitContext


class ReducedGradHooks:
    """The hooks of one backward pass that get its reduced gradients before its end."""

    def __init__(self, root: UnitContext, backward_pass: BackwardPass) -> None:
        self.published: set[Tensor] = set()  # in this pass, before its end
        self._root, self._backward_pass = root, backward_pass
        self._in_transit: Unit | None = None  # its reduced gradients go on to replicas or the host; no hook has run

    @classmethod
    def of(cls, root: UnitContext, backward_pass: BackwardPass) -> ReducedGradHooks | None:
        """Returns the hooks of a pass that begins; None if nobody wants gradients before its end."""
        return cls(root, backward_pass) if has_reduced_grad_hooks() else None

    def add(self, unit: Unit) -> None:
        """The gradients of a unit were reduced, after the gradients of the units before it."""
        # Gradients that go on to the host or to replicas come one unit later: to wait for them would stop the pass.
        ready = [] if self._in_transit is None else [self._in_transit]
        self._in_transit = None
        if any(buffer.needs_transfer_after_reduce for buffer in unit.buffers):
            self._in_transit = unit
        else:
            ready.append(unit)
        for reduced_unit in ready:
            self._call_hooks(reduced_unit)

    def _call_hooks(self, unit: Unit) -> None:
        with self._root.contract.waiting(Event("reduction", unit.name)):
            new = [
                (buffer, param, grad)
                for number, buffer in enumerate(unit.buffers)
                if buffer.keeps_reduced
                for param, grad in _wait_results(unit, number)
                if param.requires_grad
            ]
        # If no rank has used a parameter, it has no gradient; this is known at the end of the pass.
        numbers, buffers = self._root.buffer_numbers[unit], self._root.buffers
        for number in numbers:
            self._backward_pass.mark_used(number)
        unknown = {
            buffers[key.bucket].sharded_param(key.param)
            for key in self._backward_pass.unused
            if key.bucket in numbers and not buffers[key.bucket].flatten
        }
        at_once = {param for _, param, _ in new if is_consumed_in_backward(param) and param not in unknown}
        self.published |= at_once
        for buffer in dict.fromkeys(buffer for buffer, param, _ in new if param in at_once):
            buffer.publish_grads(at_once)
        if at_once:
            call_grad_published_hooks([param for _, param, _ in new if param in at_once])
        remaining = [
            (param, grad) for _, param, grad in new if param.grad is None and not is_consumed_in_backward(param)
        ]
        if remaining:
            call_reduced_grad_hooks([param for param, _ in remaining], [grad for _, grad in remaining])


def _wait_results(unit: Unit, number: int) -> list[tuple[nn.Parameter, Tensor]]:
    """Waits for the reduced gradients of one buffer; see `FlatBuffer.wait_results`."""
    buffer = unit.buffers[number]
    if buffer.transport.traits.replicates_in_halves:
        unit.log_replication(number)
    return buffer.wait_results(unit.contract.limit_seconds)


def call_hooks_at_end(root: UnitContext, published: Container[Tensor]) -> None:
    """Calls the hooks of published gradients at the end of a pass, but not for parameters `published` before it."""
    if gradient_hooks.published:
        buffers = [buffer for unit in root.units if root.reduces(unit) for buffer in unit.buffers]
        params = [param for buffer in buffers for param in buffer.sharded_params if param.grad is not None]
        call_grad_published_hooks([param for param in params if param not in published])
