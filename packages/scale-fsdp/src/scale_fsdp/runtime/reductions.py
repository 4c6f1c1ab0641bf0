"""The reductions of the units' gradients in a backward pass, one after the other, and what becomes of their results.

A reduction runs during the backward of the next unit. At the end of the pass the ranks compare how it has gone
(`BackwardPass` of scale_core), and only then are gradients published in `param.grad`.

Reduced gradients are known long before the pass has ended. Optimizer state on the host can have them copied there
(`register_reduced_grad_hook`), or consume them (`register_grad_published_hook(..., at_once=...)`). Every rank waits
for the same reductions in the same order, so the hooks run in one order on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor

from scale_core.consistency.backward_pass import BackwardPass, ParamKey, PassStatus
from scale_core.consistency.execution_order import Event
from scale_core.device.streams import on_host
from scale_core.hooks.autograd import (
    call_grad_published_hooks,
    call_post_accumulate_grad_hooks,
    call_reduced_grad_hooks,
    is_consumed_in_backward,
)
from scale_core.hooks.registry import gradient_hooks
from scale_fsdp.runtime.unit import Unit, UnitContext


class Reductions:
    """The reductions of one model's backward passes.

    Args:
        root: What the units share.
        record: Records that a unit starts a collective; see `Root.record`.
        describe_abort: The text of an aborted step, as for `BackwardPass`.
    """

    def __init__(
        self,
        root: UnitContext,
        record: Callable[[str, Unit], None],
        describe_abort: Callable[[Sequence[str]], str],
    ) -> None:
        self.current: Unit | None = None  # its reduction is under way
        self.calls_hooks = False  # someone wants reduced gradients before the end of this pass
        self.is_aborting = False
        # On a device a wait stops the stream that computes, so a reduction may run until the next one begins, one unit
        # later: two flat gradients are in memory then, but where checkpoints make memory scarce `on_recomputed` waits
        # first. On the host the same would take the memory, and gain little: the transport uses the same processor.
        self.waits_at_first_gradient = all(on_host(buffer.full) for buffer in root.buffers)
        self.backward_pass = BackwardPass(root.contract, root.buffers, describe_abort)
        self._root, self._contract, self._record = root, root.contract, record
        self._first_number: dict[Unit, int] = {}  # of a unit's buffers among those of the model
        for unit in root.units:
            self._first_number[unit] = sum(len(earlier.buffers) for earlier in self._first_number)
        self._in_transit: Unit | None = None  # its reduced gradients go on to replicas or the host; no hook has run
        self._published: set[Tensor] = set()  # in this pass, before its end

    def reset(self) -> None:
        """A backward pass begins, is over, or was aborted."""
        self.current = self._in_transit = None
        self._published = set()
        self.is_aborting = False
        self.backward_pass.reset()

    def start(self, unit: Unit, trained: Sequence[int]) -> None:
        """Starts to reduce a unit's gradients, after the unit before it; without reduction, keeps them packed."""
        if not self._root.reduces(unit):
            for buffer in unit.buffers:
                buffer.gradient.pack(wide=True)
            return
        if not trained:
            return
        self._record("reduction", unit)
        if self.current is not None:
            self.wait()
        self.current = unit
        for number in trained:
            self.backward_pass.mark_reduced(self._first_number[unit] + number)
        unit.reduce(trained)
        if self._contract.checks_every_event:  # A rank that fails can end the transfers of the last event, no more.
            unit.finish_reductions()

    def wait(self) -> None:
        """Takes the results of the reduction under way, so that its flat gradient is free before the next is filled.

        It has run while the next unit was recomputed, if that is checkpointed. If not, it has run on a device during
        the backward of the next unit, and on the host until the first gradient of that unit.
        """
        if self.current is None:
            return
        unit, self.current = self.current, None
        unit.wait_reduced()
        if not self.calls_hooks or self.is_aborting:
            return
        # Gradients that go on to the host or to replicas come one unit later: to wait for them would stop the pass.
        ready = [] if self._in_transit is None else [self._in_transit]
        self._in_transit = None
        if any(buffer.needs_transfer_after_reduce for buffer in unit.buffers):
            self._in_transit = unit
        else:
            ready.append(unit)
        for reduced_unit in ready:
            self._call_hooks(reduced_unit)

    def finish(self, find_fault: Callable[[], BaseException | None]) -> None:
        """The backward pass has ended on this rank: reduces the remaining gradients, compares, and commits.

        `find_fault` returns the error of a value that is not finite, or None. It is called after the last reduction.
        """
        units, backward_pass = self._root.units, self.backward_pass
        for unit in units:
            if unit.is_shared and not self._is_reduced(unit):
                self.start(unit, unit.trained_buffers())
        self.wait()
        for unit in units:  # The last part of a reduction may fail; it runs before all compare.
            if unit.options.communication is not None and self._is_reduced(unit):
                unit.finish_quantized_reductions()
        numbers = [number for unit in units if unit.synchronizes for number in self._numbers(unit)]
        late = backward_pass.late_gradients(numbers)
        fault = find_fault()
        status = PassStatus(late.number, len(backward_pass.unused), fault is not None)
        statuses = backward_pass.compare(status, fault)
        with backward_pass.committing():
            committed = backward_pass.commit(statuses, late, self._reduce_late, self.publish)
            self._call_hooks_at_end(committed.late_buckets, committed.unused)

    def publish(self, frozen: Mapping[int, Sequence[int]] = MappingProxyType({})) -> None:
        """Publishes reduced gradients as `grad` of the shards; `frozen` by buffer, as in `FlatBuffer.commit`."""
        with self._contract.waiting(Event("commit", self._root.outermost.name)):
            for number, buffer in enumerate(self._root.buffers):
                buffer.commit(self._contract.limit_seconds, frozen.get(number, ()))

    def _numbers(self, unit: Unit) -> range:
        """The numbers of a unit's buffers among those of the model."""
        first = self._first_number[unit]
        return range(first, first + len(unit.buffers))

    def _is_reduced(self, unit: Unit) -> bool:
        return not self.backward_pass.reduced.isdisjoint(self._numbers(unit))

    def _reduce_late(self, number: int) -> None:
        (unit,) = (unit for unit in self._root.units if number in self._numbers(unit))
        unit.reduce([number - self._first_number[unit]])

    def _call_hooks(self, unit: Unit) -> None:
        """Hands a unit's reduced gradients to those who asked for them before the end of the pass."""
        with self._contract.waiting(Event("reduction", unit.name)):
            new = [
                (buffer, param, grad)
                for number, buffer in enumerate(unit.buffers)
                if buffer.keeps_reduced
                for param, grad in unit.wait_results(number)
                if param.requires_grad
            ]
        # If no rank has used a parameter, it has no gradient; this is known at the end of the pass.
        numbers, buffers = self._numbers(unit), self._root.buffers
        for number in numbers:
            self.backward_pass.mark_used(number)
        unknown = {
            buffers[key.bucket].sharded_param(key.param)
            for key in self.backward_pass.unused
            if key.bucket in numbers and not buffers[key.bucket].flatten
        }
        at_once = {param for _, param, _ in new if is_consumed_in_backward(param) and param not in unknown}
        self._published |= at_once
        for buffer in dict.fromkeys(buffer for buffer, param, _ in new if param in at_once):
            buffer.publish_grads(at_once)
        if at_once:
            call_grad_published_hooks([param for _, param, _ in new if param in at_once])
        remaining = [
            (param, grad) for _, param, grad in new if param.grad is None and not is_consumed_in_backward(param)
        ]
        if remaining:
            call_reduced_grad_hooks([param for param, _ in remaining], [grad for _, grad in remaining])

    def _call_hooks_at_end(self, late_buffers: set[int], unused: set[ParamKey]) -> None:
        """Calls the hooks of published gradients, and those that torch calls when a gradient is accumulated."""
        if gradient_hooks.published:
            buffers = [buffer for unit in self._root.units if self._root.reduces(unit) for buffer in unit.buffers]
            params = [param for buffer in buffers for param in buffer.sharded_params if param.grad is not None]
            call_grad_published_hooks([param for param in params if param not in self._published])
        reduced = [
            param
            for unit in self._root.units
            for number, buffer in zip(self._numbers(unit), unit.buffers, strict=True)
            if number in late_buffers or self._is_reduced(unit)
            for index, param in enumerate(buffer.sharded_params)
            if buffer.flatten or ParamKey(number, index) not in unused
        ]
        if call_post_accumulate_grad_hooks(reduced):  # They may have stepped, on all that was reduced.
            for count in {buffer.group.state.optimizer_steps for buffer in self._root.buffers}:
                count.number += 1
