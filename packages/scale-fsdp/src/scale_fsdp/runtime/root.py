"""The units of one model: which one is gathered next, which stays gathered, and how a pass ends.

A pass through the model begins with one unit, the outermost one that is called. From then on every unit records what
it does, in order; that order is compared between ranks and, from the second pass on, tells which unit to prefetch.
`reductions.py` has the reductions of a backward pass, `recovery.py` a pass that fails.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from scale_core import uneven_inputs
from scale_core.consistency.backward_pass import PassStatus
from scale_core.consistency.divergence import check_interval, compare_replicas, named_buffers
from scale_core.consistency.equal_values import FIRST_PASSES, EqualValues
from scale_core.consistency.execution_order import Event, PassKind, unit_title
from scale_core.errors import StepError
from scale_core.hooks.autograd import (
    in_autograds_thread,
    in_backward,
)
from scale_fsdp.runtime.checks import (
    captured_in_graph,
    check_units,
    describe_units,
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
    precedes_update,
    take_part_in_backward,
)
from scale_fsdp.runtime.reductions import Reductions
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
        self.reductions = Reductions(self, self.record, functools.partial(abort_message, self))
        self.escaped_tensors: EscapedTensorSearch | None = None  # in the forward pass that runs now
        self.searched_kinds: set[PassKind] = set()  # of forward passes, for such tensors
        dtypes = {(unit.precision.param_dtype, unit.precision.output_dtype) for unit in self.units}
        self._computes_in_one_dtype = len(dtypes) == 1 and dtypes.pop()[1] is None
        group = self.contract.group
        self._has_replicas = any(unit.options.mesh_info.replicas.size > 1 for unit in self.units)
        self._check_every = check_interval(self.outermost.options.check_replicas_every)
        self._num_training_passes = 0
        self._equal_buffers = EqualValues()
        self.nonfinite = NonFiniteSearch(group.rank) if self.outermost.options.error_if_nonfinite else None
        check_units(self.units, group)
        self.contract.check_equal("how the model is built and wrapped", describe_units(self.units, group))
        for unit in self.units:
            unit.root, unit.contract = self, self.contract
            for buffer in unit.buffers:
                buffer.recorded_steps = self.contract.recorded_steps
        self.contract.named_params = functools.partial(_named_shards, self.units)
        if group.rank == 0 and _logger.isEnabledFor(logging.INFO):
            self._log_plan()

    def _log_plan(self) -> None:
        """Logs the number of units and the memory that they take."""
        gathered = [sum(b.layout.full_numel * b.full.dtype.itemsize for b in unit.buffers) for unit in self.units]
        largest = gathered.index(max(gathered))
        mesh = self.outermost.options.mesh_info
        _logger.info(
            "fully_shard of %s: %d units over %d ranks%s, %d parameters, %d bytes of shards on this rank; the largest "
            "is %s with %d bytes while it is gathered",
            type(self.outermost.module).__name__,
            len(self.units),
            mesh.shard.size,
            f" in {mesh.replicas.size} copies" if mesh.replicas.size > 1 else "",
            sum(len(buffer.names) for buffer in self.buffers),
            sum(buffer.shard.nbytes for buffer in self.buffers),
            unit_title(self.units[largest].name),
            gathered[largest],
        )

    # Order and memory.

    def begin_forward(self, unit: Unit, method: str) -> None:
        """A forward pass begins with `unit`: that of its module or, unless it is "", another method."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise captured_in_graph(unit)
        if self.contract.history.cycle and not self.contract.is_single_rank:
            self._end_skipped_backward()
        if self._check_every and torch.is_grad_enabled():
            number, self._num_training_passes = self._num_training_passes, self._num_training_passes + 1
            if number < FIRST_PASSES or number % self._check_every == 0:
                self._compare_replicas(number)
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

    def _compare_replicas(self, number: int) -> None:
        """Compares buffers and, at the interval, copies of shards, before training pass `number`."""
        if self.contract.is_broken:
            return
        module, step = self.outermost.module, self.contract.step + 1
        if self._has_replicas and number % self._check_every == 0:
            compare_replicas(list(module.named_parameters()), self.contract, step)
        self._equal_buffers.compare(named_buffers(module), self.contract, step)

    def _end_skipped_backward(self) -> None:
        """A forward follows a forward: where other ranks have begun the backward of the first one, aborts that step.

        Where none has, as of a program that uses two forwards in one backward, all is as it was.
        """
        contract = self.contract
        if contract.is_broken:
            return
        if contract.history.predicts_nothing:
            if any(contract.directions(is_backward=False)):
                self._forget_pass()
            return
        first, coming = contract.history.cycle[0].kind, contract.history.coming()
        if not coming or any(unit.kept_unsharded or unit.backward_unobserved for unit in self.units):
            return  # They have to stay gathered.
        pending = [unit.pending_backwards for unit in self.units]
        is_aborted = take_part_in_backward(self, coming)
        self._forget_pass()
        if not is_aborted:
            contract.history.mark_unpredictable(first)
            for unit, count in zip(self.units, pending, strict=True):
                unit.pending_backwards = count

    def _forget_pass(self) -> None:
        self.contract.forget_passes()
        for unit in self.units:
            unit.discard()

    def record(self, phase: str, unit: Unit) -> None:
        """A unit is about to start a collective; looks up the unit that the last pass gathered next."""
        event = Event(phase, unit.name)
        try:
            self.contract.record(event, compares_all=self.reductions.calls_hooks and precedes_update(self, event))
        except StepError as error:
            self.failure = error  # In a backward pass, autograd reports it to nobody.
            raise
        history, self.next_prefetch = self.contract.history, []
        if history.matches_last_order:
            for next_phase, name in history.order[history.position :]:
                if next_phase in GATHERING_PHASES and name in self.by_name:
                    self.next_prefetch = [self.by_name[name]]
                    break

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

    def reshard_and_reduce(self, unit: Unit) -> None:
        """After a backward: releases a unit, shows its shards, and starts to reduce its gradients."""
        unit.in_backward = False
        if unit.ranges:
            unit.close_range()
        self._release(unit, self.keeps_after_backward)
        if not unit.kept_unsharded:
            unit.to_sharded()
        self.reductions.start(unit, unit.trained_buffers())

    def on_recomputed(self) -> None:
        """A checkpointed unit is about to compute its gradients; the reduction before them has run at the same time.

        Only now is the unit before it gathered, so that its parameters are never in memory with the flat gradient of
        the unit behind it: at this size one of them is a tenth of the device.
        """
        self.reductions.wait()
        for unit in self.next_prefetch:
            unit.gather()

    def finish_backward(self) -> None:
        """The backward pass has ended on this rank: reduces the remaining gradients, compares, and commits."""
        if not self.reduces_any:
            fault = self._check_finite()
            self.contract.end_unchecked()
            if fault is None:
                self.reductions.publish()
            else:
                for buffer in self.buffers:
                    buffer.gradient.rollback_pass()
            return
        self.reductions.finish(self._nonfinite_fault)
        self._reset()

    def _nonfinite_fault(self) -> BaseException | None:
        """The error of a value that is not finite in this pass; all ranks hear of it when they compare."""
        self.shared_error = None if self.nonfinite is None else self.nonfinite.find()
        return self.shared_error

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
                self.reductions.backward_pass.compare(PassStatus())
                self.reshard_idle()
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """The pass has failed on this rank: aborts it together with the others, or alone, and is as before it."""
        self.entry_unit = self.escaped_tensors = None
        self.in_backward, self.reductions.is_aborting = False, True
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

    def fail(self) -> None:
        """Autograd has dropped the backward pass that ran, and raises its error to the user."""
        if self.in_backward and not in_autograds_thread():  # There `recover` aborts it, before the next pass.
            last = self.contract.history.last_event
            where = f" after the {last}" if last is not None else ""
            unknown = RuntimeError(f"its backward pass failed{where}, with an error that is raised there")
            self.abort(self.failure or unknown)

    def _reset(self) -> None:
        """A backward pass begins, is over, or was aborted."""
        self.failure = None
        self.reductions.reset()

    def _check_finite(self) -> FloatingPointError | None:
        """Raises if a value was not finite in a pass in which the ranks compare nothing, if all ranks can abort now.

        Else returns it, as in the third micro-batch of the first step: it waits until the ranks compare.
        """
        fault = None if self.nonfinite is None else self.nonfinite.find()
        if fault is not None and can_abort(self):
            raise fault
        return fault
