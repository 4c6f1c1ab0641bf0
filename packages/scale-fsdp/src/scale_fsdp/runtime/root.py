"""The units of one model: which one is gathered next, which stays gathered, and how a pass ends.

A pass through the model begins with one unit, the outermost one that is called. From then on every unit records what
it does, in order; that order is compared between ranks and, from the second pass on, tells which unit to prefetch.

A reduction runs during the backward of the next unit. At the end of the pass the ranks compare how it has gone
(`BackwardPass` of scale_core), and only then are gradients published in `param.grad`. `recovery.py` has a pass that
fails, `reduced_grad_hooks.py` hooks that want gradients before the end of the pass.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from scale_core import uneven_inputs
from scale_core.consistency.backward_pass import BackwardPass, CommittedPass, ParamKey, PassStatus
from scale_core.consistency.execution_order import Event, PassKind, unit_title
from scale_core.device.streams import on_host
from scale_core.errors import StepError
from scale_core.hooks.autograd import in_autograds_thread, in_backward
from scale_core.hooks.gradients import call_post_accumulate_grad_hooks, gradient_hooks
from scale_core.optim.step_hooks import OptimizerSteps
from scale_core.shard import as_local
from scale_fsdp.runtime.checks import (
    captured_in_graph,
    check_units,
    describe_units,
    log_plan,
    param_replaced,
    prefetch_of_another_model,
)
from scale_fsdp.runtime.escaped_tensors import EscapedTensorSearch
from scale_fsdp.runtime.nonfinite import NonFiniteSearch
from scale_fsdp.runtime.recovery import (
    SKIPPED_BACKWARD,
    abort_message,
    abort_on_all_ranks,
    can_abort,
    end_skipped_backward,
    precedes_update,
)
from scale_fsdp.runtime.reduced_grad_hooks import ReducedGradHooks, call_hooks_at_end
from scale_fsdp.runtime.replica_checks import ReplicaChecks
from scale_fsdp.runtime.unit import GATHERING_PHASES, Unit, UnitContext

_logger = logging.getLogger(__name__)


def _named_shards(units: Sequence[Unit]) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's part of each parameter; of flattened ones the flat parameter by its first name."""
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        yield from zip(buffer.names, buffer.sharded_params, strict=False)


class Root(UnitContext):
    """The units of one model in their passes."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units, functools.partial(abort_message, self))
        self.next_prefetch: list[Unit] = []  # the unit that the last pass of this kind gathered next, if that is known
        self.backward_pass = BackwardPass(self.contract, self.buffers, functools.partial(abort_message, self))
        self.reducing: Unit | None = None  # its reduction is under way
        self.reduced_grad_hooks: ReducedGradHooks | None = None  # that want gradients before the end of this pass
        # On a device a wait stops the stream that computes, so a reduction may run until the next one begins, one unit
        # later: two flat gradients are in memory then, but where checkpoints make memory scarce `on_recomputed` waits
        # first. On the host the same would take the memory, and gain little: the transport uses the same processor.
        self.waits_at_first_gradient = all(on_host(buffer.full) for buffer in self.buffers)
        self.escaped_tensors: EscapedTensorSearch | None = None  # in the forward pass that runs now
        self.searched_kinds: set[PassKind] = set()  # of forward passes, for such tensors
        dtypes = {(unit.precision.param_dtype, unit.precision.output_dtype) for unit in self.units}
        self._computes_in_one_dtype = len(dtypes) == 1 and dtypes.pop()[1] is None
        group = self.contract.group
        self._replica_checks, self._num_training_passes = ReplicaChecks.of(self.units, self.contract), 0
        self.nonfinite = NonFiniteSearch(group.rank) if self.outermost.options.error_if_nonfinite else None
        check_units(self.units, group)
        self.contract.check_equal("how the model is built and wrapped", describe_units(self.units, group))
        recorded_steps = self.contract.recorded_steps = OptimizerSteps()
        for unit in self.units:
            unit.root, unit.contract = self, self.contract
            for buffer in unit.buffers:
                buffer.recorded_steps = recorded_steps
        self.contract.named_params = functools.partial(_named_shards, self.units)
        if group.rank == 0 and _logger.isEnabledFor(logging.INFO):
            log_plan(_logger, self.units)

    # Order and memory.

    def begin_forward(self, unit: Unit, method: str) -> None:
        """A forward pass begins with `unit`: the forward of its module or, unless it is "", another method."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise captured_in_graph(unit)
        if self.contract.history.cycle and not self.contract.is_single_rank:
            end_skipped_backward(self)
        if self._replica_checks is not None and torch.is_grad_enabled():
            number, self._num_training_passes = self._num_training_passes, self._num_training_passes + 1
            if number == self._replica_checks.next_pass:
                self._replica_checks.compare(number)
        self.entry_unit = unit
        idle = self._idle_units()
        # Another method runs other units as a rule, or the same in another order: its passes are of another kind.
        name = f"forward of {unit.name}{f' by {method}' if method else ''}"
        self.contract.begin(PassKind(name, torch.is_grad_enabled(), unit.module.training), new_step=True)
        for member in self.units:
            member.begin_forward()
            # Parameters that an earlier pass has left are gathered again: `param.data` can be written to without a
            # trace.
            if member in idle or member.is_stale:
                member.release()

    def record(self, phase: str, unit: Unit) -> None:
        """Compares that all ranks are about to start this collective; then sets what `unshard` prefetches."""
        event = Event(phase, unit.name)
        try:
            self.contract.record(
                event, compares_all=self.reduced_grad_hooks is not None and precedes_update(self, event)
            )
        except StepError as error:
            self.failure = error  # In a backward pass, autograd reports it to nobody.
            raise
        self.next_prefetch = self.prefetched_units()

    def prefetched_units(self) -> list[Unit]:
        """The unit to prefetch: the one that the last pass of this kind gathered next, if this pass repeats it."""
        history = self.contract.history
        if history.matches_last_order:
            for phase, name in history.order[history.position :]:
                if phase in GATHERING_PHASES and name in self.by_name:
                    return [self.by_name[name]]
        return []

    def unshard(self, unit: Unit, phase: str) -> None:
        """Gathers a unit, the owners of its shared parameters, and units to prefetch; shows its full parameters."""
        self.record(phase, unit)
        if phase == "recomputation" and unit.in_backward:
            return  # Its backward has gathered it.
        prefetch = unit.prefetch.get("backward" if self.in_backward else "forward", [])
        if self.outermost.name:  # A part of a model that was entered, or copied, by itself, without the rest.
            prefetch = [other for other in prefetch if other.root is self]
        for other in prefetch:
            if other.root is not self:
                raise prefetch_of_another_model(unit, other)
        self.starting_gathers = gathers = [*unit.shared_owners, unit, *self.next_prefetch, *prefetch]
        for owner in gathers:
            owner.gather()
        self.starting_gathers = []
        for owner in (*unit.shared_owners, unit):
            owner.use_count += 1
            owner.wait_gathered()
        if (slot := unit.replaced_slot()) is not None:
            raise param_replaced(unit, slot)
        unit.to_unsharded()
        unit.kept_unsharded = False  # This pass releases it as it does any unit.

    def reshard(self, unit: Unit) -> None:
        """After a forward: releases a unit, unless it is kept, and shows its shards."""
        keep = self.keeps_after_forward(unit)
        self._release(unit, lambda each: keep or self.keeps_after_forward(each), keep_part=torch.is_grad_enabled())
        if not unit.use_count and not unit.kept_unsharded:
            unit.to_sharded()

    def _release(self, unit: Unit, keeps: Callable[[Unit], bool], *, keep_part: bool = False) -> None:
        """Ends one use of the unit and of the owners of its shared parameters; frees those without another use."""
        for owner in (unit, *unit.shared_owners):
            # A forward that failed before it was gathered had no use yet.
            owner.use_count = max(0, owner.use_count - 1)
            if not owner.use_count and not keeps(owner):
                owner.release(keep_part=keep_part)
            if owner is not unit and not owner.use_count and not owner.kept_unsharded:
                owner.to_sharded()  # It ran inside this one, and stayed open for it.

    def keeps_after_forward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered when its forward has ended."""
        if unit.backward_unobserved or unit.kept_unsharded or unit.modules_to_run:
            return True
        history = self.contract.history
        order, position = history.order, history.position
        coming = order[position] if history.matches_last_order and position < len(order) else None
        if coming in (Event("forward", unit.name), Event("backward", unit.name)):
            return True  # It runs again at once, or was recomputed inside of another unit and has its backward next.
        if not torch.is_grad_enabled():
            return False
        # The entry unit's backward comes first: releasing it would only mean to gather it again.
        return not unit.reshard_after_forward or (unit is self.entry_unit and not unit.reshards_entry)

    def keeps_after_backward(self, unit: Unit) -> bool:
        """Whether a unit stays gathered for the next micro-batch: it was to be kept, and no optimizer step is due."""
        if unit.kept_unsharded or not unit.reshard_after_backward:
            return True
        return not (unit.reshard_after_forward or self.reduces(unit))

    def reshard_idle(self) -> None:
        """Between passes: frees parameters that are not kept for the next one, and lets shards be written to."""
        for unit in self._idle_units():
            unit.release()
        for unit in self.units:
            for buffer in unit.buffers:
                buffer.wait_sent()

    def _idle_units(self) -> list[Unit]:
        """The units that are not kept for the next pass."""
        return [unit for unit in self.units if not (self.keeps_after_backward(unit) or unit.backward_unobserved)]

    def casts_inputs_of(self, unit: Unit) -> bool:
        """Whether floating-point inputs take the unit's dtype."""
        casts = unit.precision.cast_forward_inputs
        if casts != "root":
            return casts
        return unit is self.entry_unit or unit is self.outermost or not self._computes_in_one_dtype

    # The backward pass.

    def begin_backward(self) -> None:
        """The first gradient of a pass has arrived at one of the units."""
        if self.entry_unit is not None:
            raise RuntimeError(
                f"a backward pass has begun inside the forward of {unit_title(self.entry_unit.name)}: take gradients "
                "after the outermost sharded module has returned, or leave the module that takes them unsharded"
            )
        if uneven_inputs.active_share is not None and not self.synchronizes:
            raise RuntimeError(
                "join() counts whole steps, and this backward pass is one of several in a step, under no_sync(): let "
                "join() yield all micro-batches of a step together, or leave no_sync() out"
            )
        self.in_backward = True
        self._reset()
        if not self.contract.is_single_rank and self.contract.history.predicts_nothing:
            directions = self.contract.directions(is_backward=True)
            if not all(directions):
                reasons = ["" if is_backward else f"RuntimeError: {SKIPPED_BACKWARD}" for is_backward in directions]
                error = StepError(abort_message(self, reasons), step=self.contract.step, rank=directions.index(False))
                self.abort(error)
                raise error
        kind = "backward with reduction" if self.reduces_any else "backward"
        self.contract.begin(PassKind(kind, grad=True, training=True), new_step=False)
        if gradient_hooks.reduced or gradient_hooks.published:
            self.reduced_grad_hooks = ReducedGradHooks.of(self, self.backward_pass)

    def reshard_and_reduce(self, unit: Unit) -> None:
        """After a backward: releases a unit, shows its shards, and starts to reduce its gradients."""
        unit.in_backward = False
        if unit.ranges:
            unit.close_range()
        self._release(unit, self.keeps_after_backward)
        if not unit.kept_unsharded:
            unit.to_sharded()
        self._start_reduction(unit)

    def _start_reduction(self, unit: Unit) -> None:
        """Starts to reduce a unit's gradients, after the unit before it; without reduction, keeps them packed."""
        if not self.reduces(unit):
            for buffer in unit.buffers:
                buffer.gradient.pack(wide=True)
            return
        trained = unit.trained_buffers()
        if not trained:
            return
        self.record("reduction", unit)
        self.wait_reduction()
        self.reducing = unit
        for number in trained:
            self.backward_pass.mark_reduced(self.buffer_numbers[unit][number])
        unit.reduce(trained)
        if self.contract.checks_every_event:  # A rank that fails can end the transfers of the last event, no more.
            unit.finish_reductions()

    def wait_reduction(self) -> None:
        """Takes the results of the reduction under way, so that its flat gradient is free before the next is filled.

        It has run while the next unit was recomputed, if that is checkpointed. If not, it has run on a device during
        the backward of the next unit, and on the host until the first gradient of that unit.
        """
        if self.reducing is not None:
            unit, self.reducing = self.reducing, None
            unit.wait_reduced()
            if self.reduced_grad_hooks is not None:
                self.reduced_grad_hooks.add(unit)

    def on_recomputed(self) -> None:
        """A checkpointed unit is about to compute its gradients; the reduction before them has run at the same time.

        Only now is the unit before it gathered, so that its parameters are never in memory with the flat gradient of
        the unit behind it: at this size one of them is a tenth of the device.
        """
        self.wait_reduction()
        for unit in self.next_prefetch:
            unit.gather()

    def finish_backward(self) -> None:
        """The backward pass has ended on this rank: reduces the remaining gradients, compares, and commits."""
        if not self.reduces_any:
            fault = self._check_finite()
            self.contract.end_unchecked()
            if fault is None:
                self.publish()
            else:
                for buffer in self.buffers:
                    buffer.gradient.rollback_pass()
            return
        for unit in self.units:
            if unit.is_shared and not self._is_reduced(unit):
                self._start_reduction(unit)
        self.wait_reduction()
        for unit in self.units:  # The last part of a reduction may fail; it runs before all compare.
            if unit.options.communication is not None and self._is_reduced(unit):
                unit.finish_quantized_reductions()
        numbers = [number for unit in self.units if unit.synchronizes for number in self.buffer_numbers[unit]]
        late = self.backward_pass.late_gradients(numbers)
        # The error of a value that is not finite in this pass; all ranks hear of it when they compare.
        fault = self.shared_error = None if self.nonfinite is None else self.nonfinite.find()
        status = PassStatus(late.number, len(self.backward_pass.unused), fault is not None)
        statuses = self.backward_pass.compare(status, fault)
        with self.backward_pass.committing():
            self._call_hooks_at_end(self.backward_pass.commit(statuses, late, self._reduce_late, self.publish))
        self._reset()

    def publish(self, frozen: Mapping[int, Sequence[int]] = MappingProxyType({})) -> None:
        """Publishes reduced gradients as `grad` of the shards; `frozen` by buffer, as in `FlatBuffer.commit`."""
        with self.contract.waiting(Event("commit", self.outermost.name)):
            for number, buffer in enumerate(self.buffers):
                buffer.commit(self.contract.limit_seconds, frozen.get(number, ()))

    def _is_reduced(self, unit: Unit) -> bool:
        return not self.backward_pass.reduced.isdisjoint(self.buffer_numbers[unit])

    def _reduce_late(self, number: int) -> None:
        (unit,) = (unit for unit in self.units if number in self.buffer_numbers[unit])
        unit.reduce([number - self.buffer_numbers[unit].start])

    def _call_hooks_at_end(self, committed: CommittedPass) -> None:
        """Calls the hooks of published gradients, and those that torch calls when a gradient is accumulated."""
        if gradient_hooks.published:
            call_hooks_at_end(self, () if self.reduced_grad_hooks is None else self.reduced_grad_hooks.published)
        with as_local():
            hooked = [
                param
                for unit in self.units
                for number, buffer in zip(self.buffer_numbers[unit], unit.buffers, strict=True)
                if number in committed.late_buckets or self._is_reduced(unit)
                for index, param in enumerate(buffer.sharded_params)
                if param._post_accumulate_grad_hooks
                if buffer.flatten or ParamKey(number, index) not in committed.unused
            ]
        if hooked and call_post_accumulate_grad_hooks(hooked):  # They may have stepped, on all that was reduced.
            for count in {buffer.group.state.optimizer_steps for buffer in self.buffers}:
                count.number += 1

    # How a pass ends.

    def end_forward(self) -> None:
        """The forward of the entry unit has ended, and so has the pass."""
        for unit in self.units:
            if unit.modules_to_run and not unit.use_count:  # The pass has called none of its modules, or some.
                unit.modules_to_run = set()
                if not self.keeps_after_forward(unit):
                    unit.release(keep_part=torch.is_grad_enabled())
        self.entry_unit = None
        try:
            if torch.is_grad_enabled():
                self._check_finite()
                self.contract.end_unchecked()
            else:
                # Compared first: where the ranks differ, a prefetched unit may never arrive.
                self.backward_pass.compare(PassStatus())
                self.reshard_idle()
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """The pass has failed on this rank: aborts it together with the others, or alone, and is as before it."""
        self.entry_unit = self.escaped_tensors = None
        self.in_backward, self.reduced_grad_hooks = False, None
        on_all_ranks = False
        try:
            on_all_ranks = abort_on_all_ranks(self, error)
        finally:
            if not on_all_ranks:  # The others find it when their wait times out.
                self.contract.report_failure(error)
            self.contract.forget_passes()
            if self.nonfinite is not None:
                self.nonfinite.reset()
            self.shared_error, self.starting_gathers = None, []
            self._reset()
            for unit in self.units:
                unit.discard()

    def recover(self) -> None:
        """Ends a backward pass that has failed; autograd reports that to nobody."""
        if self.in_backward and not in_backward():
            self.abort(RuntimeError("the backward pass before this one did not come to its end"))

    def on_backward_failed(self) -> None:
        """An error in backward: autograd raises it to the user, and this rank aborts the pass on all ranks."""
        if self.in_backward and not in_autograds_thread():  # There `recover` aborts it, before the next pass.
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            unknown = RuntimeError(f"its backward pass failed{where}, with an error that is raised there")
            self.abort(self.failure or unknown)

    def _reset(self) -> None:
        """A backward pass begins, is over, or was aborted."""
        self.failure = self.reducing = self.reduced_grad_hooks = None
        self.backward_pass.reset()

    def _check_finite(self) -> FloatingPointError | None:
        """Raises if a value was not finite in a pass in which the ranks compare nothing, if all ranks can abort now.

        Else returns it, as in the third micro-batch of the first step: it waits until the ranks compare.
        """
        fault = None if self.nonfinite is None else self.nonfinite.find()
        if fault is not None and can_abort(self):
            raise fault
        return fault
