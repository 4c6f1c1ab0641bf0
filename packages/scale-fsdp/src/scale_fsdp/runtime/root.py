"""The units of one model: which one is gathered next, stays gathered, is reduced when, and how a pass ends.

A pass through the model begins with one unit, the outermost one that is called. From then on every unit records what
it does, in order; that order is compared between ranks and, from the second pass on, tells which unit to prefetch.

Reductions follow each other, one at a time, each during the backward of the next unit. At the end the ranks compare
their events, and only then are gradients published in `param.grad`.

A parameter that no rank has used keeps the gradient it had, none as a rule, as in plain PyTorch: Adam's momentum and
weight decay would move it on zeros. One that only some ranks have used counts as zeros on the others. No rank can know
alone which is which, so each records the gradients that it reduced as zeros, and they compare that at the end of the
pass.

Reduced gradients are known long before the pass has ended: optimizer state on the host can have them copied there
(`register_reduced_grad_hook`), or consume them (`register_grad_published_hook(..., at_once=...)`). Every rank waits
for the same reductions in the same order, so the hooks run in one order on all ranks.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from scale_core import uneven_inputs
from scale_core.comm.group_state import CallLog
from scale_core.consistency.all_ranks import all_gather_json
from scale_core.consistency.divergence import check_interval, compare_replicas, named_buffers
from scale_core.consistency.equal_values import FIRST_PASSES, EqualValues
from scale_core.consistency.execution_order import Event, PassKind, unit_title
from scale_core.device.streams import on_host
from scale_core.errors import StepError
from scale_core.flat.buffer import FlatBuffer
from scale_core.hooks.autograd import (
    call_grad_published_hooks,
    call_post_accumulate_grad_hooks,
    call_reduced_grad_hooks,
    in_autograds_thread,
    in_backward,
    is_consumed_in_backward,
)
from scale_core.hooks.registry import gradient_hooks
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
    PassStatus,
    abort_message,
    abort_on_all_ranks,
    can_abort,
    precedes_update,
    raise_aborted,
    take_part_in_backward,
)
from scale_fsdp.runtime.unit import GATHERING_PHASES, Unit, UnitContext

_logger = logging.getLogger(__name__)


class ParamKey(NamedTuple):
    """A parameter by numbers that are equal on all ranks."""

    unit: int
    buffer: int  # in the unit
    param: int  # in the buffer


class LateGradients(NamedTuple):
    """Gradients of one rank at the end of a pass that were not reduced with their unit, or that do not train."""

    buffers: list[tuple[int, int]]  # unit, buffer: gradients that came after its reduction, or of frozen parameters
    frozen: list[ParamKey]  # parameters that were frozen when they had a gradient from under `no_sync`


def _named_shards(units: Sequence[Unit]) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's part of each parameter; of flattened ones the flat parameter by its first name."""
    for buffer in (buffer for unit in units for buffer in unit.buffers):
        yield from zip(buffer.names, buffer.sharded_params, strict=False)


class Root(UnitContext):
    """The units of one model in their passes."""

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__(units, functools.partial(abort_message, self))
        self.next_prefetch: list[Unit] = []  # the unit that the last pass of this kind gathered next, if that is known
        self.reducing: Unit | None = None  # its reduction is under way
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._reduced: set[Unit] = set()
        self._unused: dict[ParamKey, bool] = {}  # reduced as zeros, and whether there was no gradient before
        self._in_transit: Unit | None = None  # its reduced gradients go on to replicas or the host; no hook has run
        self._published: set[Tensor] = set()  # in this pass, before its end
        self.escaped_tensors: EscapedTensorSearch | None = None  # in the forward pass that runs now
        self.searched_kinds: set[PassKind] = set()  # of forward passes, for such tensors
        # On a device a wait stops the stream that computes, so a reduction may run until the next one begins, one unit
        # later: two flat gradients are in memory then, but where checkpoints make memory scarce `on_recomputed` waits
        # first. On the host the same would take the memory, and gain little: the transport uses the same processor.
        self.waits_at_first_gradient = all(on_host(buffer.full) for buffer in self.buffers)
        self.calls_reduced_hooks = False  # someone wants reduced gradients before the end of this pass
        self._is_aborting = False
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
            self.contract.record(event, compares_all=self.calls_reduced_hooks and precedes_update(self, event))
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

    def reduces(self, unit: Unit) -> bool:
        """Whether a unit's gradients are reduced at the end of this backward pass."""
        return self.synchronizes and unit.synchronizes

    @property
    def reduces_any(self) -> bool:
        """Whether any unit's are."""
        return self.synchronizes and any(unit.synchronizes for unit in self.units)

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
        self._reduce(unit, unit.trained_buffers())

    def _reduce(self, unit: Unit, trained: Sequence[int]) -> None:
        """Starts to reduce a unit's gradients, after the unit before it; without reduction, keeps them packed."""
        if not self.reduces(unit):
            for buffer in unit.buffers:
                buffer.gradient.pack(wide=True)
            return
        if not trained:
            return
        self.record("reduction", unit)
        if self.reducing is not None:
            self.wait_previous_reduction()
        self.reducing = unit
        if unit in self._reduced:
            self._record_late(unit)  # A second reduction in a pass has only late gradients.
        else:
            self._reduced.add(unit)
            for number in trained:  # Parameters without a gradient count as zeros.
                buffer = unit.buffers[number]
                for index in buffer.gradient.missing():
                    had_none = buffer.sharded_param(index).grad is None
                    self._unused[ParamKey(self._numbers[unit], number, index)] = had_none
        unit.reduce(trained)
        if self.contract.checks_every_event:  # A rank that fails can end the transfers of the last event, no more.
            unit.finish_reductions()

    def wait_previous_reduction(self) -> None:
        """Takes the results of the reduction under way, so that its flat gradient is free before the next is filled.

        It has run while the next unit was recomputed, if that is checkpointed. If not, it has run on a device during
        the backward of the next unit, and on the host until the first gradient of that unit.
        """
        if self.reducing is None:
            return
        unit, self.reducing = self.reducing, None
        unit.wait_reduced()
        if not self.calls_reduced_hooks or self._is_aborting:
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

    def on_recomputed(self) -> None:
        """A checkpointed unit is about to compute its gradients; the reduction before them has run at the same time.

        Only now is the unit before it gathered, so that its parameters are never in memory with the flat gradient of
        the unit behind it: at this size one of them is a tenth of the device.
        """
        self.wait_previous_reduction()
        for unit in self.next_prefetch:
            unit.gather()

    def finish_backward(self) -> None:
        """The backward pass has ended on this rank: reduces the remaining gradients, compares, and commits."""
        if not self.reduces_any:
            fault = self._check_finite()
            self.contract.end_unchecked()
            if fault is None:
                self._commit_buffers()
            else:
                for buffer in self.buffers:
                    buffer.gradient.rollback_pass()
            return
        for unit in self.units:
            if unit.is_shared and unit not in self._reduced:
                self._reduce(unit, unit.trained_buffers())
        self.wait_previous_reduction()
        for unit in self.units:  # The last part of a reduction may fail; it runs before all compare.
            if unit.options.communication is not None and unit in self._reduced:
                unit.finish_quantized_reductions()
        for unit in self.units if self._unused else ():
            self._record_late(unit)
        late = LateGradients([], [])
        for number, unit in enumerate(self.units):
            for buffer_index, buffer in enumerate(unit.buffers if unit.synchronizes else ()):
                if buffer.gradient:
                    late.buffers.append((number, buffer_index))
                late.frozen.extend(ParamKey(number, buffer_index, index) for index in buffer.gradient.frozen())
        fault = None if self.nonfinite is None else self.nonfinite.find()
        statuses = self._end_checked(len(late.buffers) + len(late.frozen), len(self._unused), fault)
        try:
            self._commit(statuses, late)
        except BaseException:  # The others found no failure, and are about to use their gradients.
            self.contract.mark_late_failure()
            raise
        self._reset()

    def _commit(self, statuses: Sequence[PassStatus], late: LateGradients) -> None:
        """The pass has gone well on every rank: publishes its gradients."""
        frozen: dict[FlatBuffer, list[int]] = {}
        unused: set[ParamKey] = set()
        late_buffers: set[tuple[int, int]] = set()
        if any(status.num_late for status in statuses):
            of_ranks = [LateGradients(*row) for row in all_gather_json(late, self.contract)]
            late_buffers = {(number, index) for late_grads in of_ranks for number, index in late_grads.buffers}
            for number, buffer_index in sorted(late_buffers):
                self.units[number].reduce([buffer_index])
            for key in (ParamKey(*key) for late_grads in of_ranks for key in late_grads.frozen):
                frozen.setdefault(self.units[key.unit].buffers[key.buffer], []).append(key.param)
        self._commit_buffers(frozen)
        if all(status.num_unused for status in statuses):
            # Takes the zeros away from parameters that no rank has used and that had no gradient before.
            keys_by_rank = all_gather_json(sorted(self._unused), self.contract)
            unused = set.intersection(*({ParamKey(*key) for key in keys} for keys in keys_by_rank))
            for key in unused:
                buffer = self.units[key.unit].buffers[key.buffer]
                if self._unused[key] and not buffer.flatten:
                    buffer.sharded_param(key.param).grad = None
        if gradient_hooks.published:
            buffers = [buffer for unit in self.units if self.reduces(unit) for buffer in unit.buffers]
            params = [param for buffer in buffers for param in buffer.sharded_params if param.grad is not None]
            call_grad_published_hooks([param for param in params if param not in self._published])
        reduced = [
            param
            for number, unit in enumerate(self.units)
            for buffer_index, buffer in enumerate(unit.buffers)
            if unit in self._reduced or (number, buffer_index) in late_buffers
            for index, param in enumerate(buffer.sharded_params)
            if buffer.flatten or ParamKey(number, buffer_index, index) not in unused
        ]
        if call_post_accumulate_grad_hooks(reduced):  # They may have stepped, on all that was reduced.
            for count in {buffer.group.state.optimizer_steps for unit in self.units for buffer in unit.buffers}:
                count.number += 1

    def _commit_buffers(self, frozen: Mapping[FlatBuffer, Sequence[int]] = MappingProxyType({})) -> None:
        """Reduced gradients go to the shards' `grad`; others wait on. `frozen` as in `FlatBuffer.commit`."""
        with self.contract.waiting(Event("commit", self.outermost.name)):
            for buffer in self.buffers:
                buffer.commit(self.contract.limit_seconds, frozen.get(buffer, ()))

    def _record_late(self, unit: Unit) -> None:
        """A parameter that got a gradient after its unit's reduction is not unused."""
        if self._unused and unit in self._reduced:
            for number, buffer in enumerate(unit.buffers):
                for index in buffer.gradient.has_grad():
                    self._unused.pop(ParamKey(self._numbers[unit], number, index), None)

    def _call_hooks(self, unit: Unit) -> None:
        """Hands a unit's reduced gradients to those who asked for them before the end of the pass."""
        with self.contract.waiting(Event("reduction", unit.name)):
            new = [
                (buffer, param, grad)
                for number, buffer in enumerate(unit.buffers)
                if buffer.keeps_reduced
                for param, grad in unit.wait_results(number)
                if param.requires_grad
            ]
        # If no rank has used a parameter, it has no gradient; this is known at the end of the pass.
        self._record_late(unit)
        keys = (key for key in self._unused if key.unit == self._numbers[unit] and not unit.buffers[key.buffer].flatten)
        unknown = {unit.buffers[key.buffer].sharded_param(key.param) for key in keys}
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
                self._end_checked()
                self.reshard_idle()
        except BaseException as error:
            self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """The pass has failed on this rank: aborts it together with the others, or alone, and is as before it."""
        self.entry_unit = self.escaped_tensors = None
        self.in_backward, self._is_aborting = False, True
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
        self.reducing = self.failure = self._in_transit = None
        self._reduced, self._unused, self._published = set(), {}, set()
        self._is_aborting = False

    def _check_finite(self) -> FloatingPointError | None:
        """Raises if a value was not finite in a pass in which the ranks compare nothing, if all ranks can abort now.

        Else returns it, as in the third micro-batch of the first step: it waits until the ranks compare.
        """
        fault = None if self.nonfinite is None else self.nonfinite.find()
        if fault is not None and can_abort(self):
            raise fault
        return fault

    def _end_checked(
        self, num_late: int = 0, num_unused: int = 0, fault: BaseException | None = None
    ) -> list[PassStatus]:
        """Compares the events of the ranks since they last compared; returns each one's status, by rank."""
        rows = self.contract.end_checked(*PassStatus(num_late, num_unused, fault is not None))
        statuses = [PassStatus(*row) for row in rows]
        if any(status.failed for status in statuses):
            raise_aborted(self, fault)
        if CallLog.is_used:
            self.contract.compare_calls()
        return statuses
