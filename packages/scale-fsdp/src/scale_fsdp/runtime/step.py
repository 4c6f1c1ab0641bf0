"""One step of a unit, in the order of time: the page to read first.

torch calls `pre_forward` and `post_forward` around the module. Autograd calls `pre_backward`, `pre_accumulate_grads`
and `post_backward`, and at the end of the whole pass `finalize_backward`. Which unit is gathered and kept, and how a
pass ends, is in `root.py`; the work of one unit in `unit.py`; the texts of errors in `checks.py`.

FSDP2's names, and ours:

    FSDPState                       the hooks in `step`
    FSDPStateContext                `UnitContext`; with FSDPCommContext and post_order, `Root`
    FSDPParamGroup                  `Unit`
      unshard, wait_for_unshard     `Unit.gather`, `Unit.wait_gathered`
      _prefetch_unshard             `Root.prefetched_units`
      foreach_all_gather            `FlatBuffer.gather`, and `PlainTransport.all_gather`
      foreach_reduce                `FlatBuffer.reduce`, and `PlainReduceScatter.reduce`
    FSDPParam                       `FlatBuffer`, which has several parameters
      sharded_param                 `FlatBuffer.sharded_params`: `model.parameters()` and the optimizer have these
      unsharded_accumulated_grad    `FlatGradient.accumulated`
      reduce_scatter_output         what `Reduction.results` returns
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from scale_core import compat
from scale_core.compat import profiler_runs
from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_core.hooks.autograd import (
    after_backward,
    after_gradient,
    alias_outputs,
    before_backward,
    in_backward,
    register_post_backward,
)
from scale_core.shard import as_local
from scale_fsdp.api import cast_floating
from scale_fsdp.runtime import checks
from scale_fsdp.runtime.escaped_tensors import EscapedTensorSearch
from scale_fsdp.runtime.root import Root
from scale_fsdp.runtime.unit import UNIT, ForwardCalls, Unit, units_in


@compat.untraced
def pre_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: str = ""
) -> tuple[Any, Any]:
    """Before the module, or a registered method of it, runs: unshards it, and prefetches the next unit."""
    if unit.in_summon:
        if torch.is_grad_enabled() and unit.trains:
            raise checks.trains_in_summon(unit)
        return args, kwargs
    try:
        root = _begin_forward(unit, method)
        recomputing = root.in_backward
        root.unshard(unit, "recomputation" if recomputing else "forward")
        if root.escaped_tensors is not None:
            root.escaped_tensors.enter_unit(unit)
        dtype = unit.precision.param_dtype
        if dtype is not None and root.casts_inputs_of(unit):
            args, kwargs = cast_floating((args, kwargs), dtype)
        if torch.is_grad_enabled() and not (recomputing and unit.pending_backwards):
            (args, kwargs), _ = after_backward((args, kwargs), functools.partial(post_backward, unit))
            unit.pending_backwards += 1
            unit.forward_calls.count += 1
        if profiler_runs():
            unit.open_range("recomputation" if recomputing else "forward")
        return args, kwargs
    except BaseException as error:
        abort_on_interrupt(unit, error)
        raise


@compat.untraced
def post_forward(unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """After the module has run, or failed: reshards it, and hooks the gradients of its outputs."""
    root = unit.root
    if unit.in_summon or root is None:  # Without a root it has failed before it began.
        return output
    assert isinstance(root, Root)
    if unit.ranges:
        unit.close_range()
    if root.escaped_tensors is not None:
        root.escaped_tensors.leave_unit(unit)
    try:
        raised = sys.exc_info()[1]
        if raised is not None and raised is not unit.error_at_entry:
            _post_failed_forward(unit, root, raised)
            return None
        if unit.precision.output_dtype is not None:
            output = cast_floating(output, unit.precision.output_dtype)
        if root.in_backward and unit.in_backward:
            root.on_recomputed()
            return output  # Recomputed for its own backward, which needs the parameters now.
        slot, versions = unit.replaced_slot(), unit.shard_versions
        if slot is not None or any(buffer.is_overwritten for buffer in unit.buffers):
            error = checks.params_overwritten(unit) if slot is None else checks.param_replaced(unit, slot)
            _post_failed_forward(unit, root, error)
            raise error
        if root.nonfinite is not None and not root.in_backward and root.contract.history.current.kind.grad:
            root.nonfinite.add_output(unit, output)
        if torch.is_grad_enabled():
            unit.forward_calls.shard_versions = versions
            unit.await_backward(True)
            output = alias_outputs(output)
            observed = before_backward(output, functools.partial(pre_backward, unit, versions, unit.forward_calls))
            # Where no output was found, nothing shows when the backward begins, so it stays gathered until it has.
            is_unobserved = unit.has_escaped_tensors or (not observed and unit.trains)
            unit.backward_unobserved = unit.backward_unobserved or is_unobserved
        unit.modules_to_run.discard(id(module))
        root.reshard(unit)
        if root.entry_unit is unit:
            if root.escaped_tensors is not None:
                search, root.escaped_tensors = root.escaped_tensors, None
                search.hook_tensors(_begin_escaped_backward)
                root.searched_kinds.add(root.contract.history.current.kind)
            root.end_forward()
        return output
    except BaseException as error:
        abort_on_interrupt(unit, error)
        raise


def pre_backward(unit: Unit, versions: Sequence[int], calls: ForwardCalls) -> None:
    """A gradient has arrived at the module's outputs: unshards it, and prefetches the unit before it.

    `versions` are the versions of the shards when the module ran, `calls` the calls of that forward pass.
    """
    root = unit.root
    assert isinstance(root, Root)
    if torch.is_grad_enabled() and not all(buffer.is_aliased for buffer in unit.buffers):
        raise checks.second_derivative(unit)
    if not root.in_backward:
        _begin_backward(root)
    if versions != unit.shard_versions:
        raise checks.changed_before_backward(unit)
    if not unit.in_backward:
        unit.in_backward = True
        # Where none is left, this graph was kept from an earlier pass, or lived through a forward after one.
        unit.pending_backwards = max(unit.pending_backwards, 0) or calls.count
        root.unshard(unit, "backward")
        if profiler_runs():
            unit.open_range("backward")


def pre_accumulate_grads(unit_ref: weakref.ref[Unit], number: int) -> None:
    """The first gradient of this pass has come to a buffer; `FlatGradient.make_hook` moves it and those after it."""
    unit = unit_ref()  # Autograd holds the hook where no garbage collector can see it.
    assert unit is not None, "a gradient has come whose unit is gone"
    root, gradient = unit.root, unit.buffers[number].gradient
    assert isinstance(root, Root)
    if not root.in_backward:
        _begin_backward(root)
    if root.waits_at_first_gradient:
        root.wait_reduction()
    gradient.wide = not (root.synchronizes and unit.synchronizes)
    search = root.nonfinite
    gradient.observer = None if search is None else functools.partial(search.add_gradient, unit, number)


def post_backward(unit: Unit) -> None:
    """The gradients of one call's inputs are there; after the last call's, reshards and reduces."""
    unit.pending_backwards -= 1
    unit.input_grads_seen = True
    if unit.in_backward and unit.pending_backwards <= 0 and not unit.is_shared:
        assert isinstance(unit.root, Root)
        unit.root.reshard_and_reduce(unit)


def finalize_backward(root: Root) -> None:
    """The whole pass has run on this rank: ends units whose inputs got no gradient, and commits the pass."""
    try:
        for unit in root.units:
            if unit.in_backward:
                root.reshard_and_reduce(unit)
            unit.end_backward()
        root.finish_backward()
    except BaseException as error:
        root.abort(error)
        raise
    root.in_backward = False
    root.reshard_idle()


# Parts of the above.


def root_of(unit: Unit) -> Root:
    """Returns the root of a unit's model; a unit without one becomes the outermost."""
    if unit.root is not None and unit.root.stale:
        unit.root.recover()
        for member in unit.root.units:
            member.root = None
    units = (
        dict.fromkeys(unit_inside for module in unit.modules for unit_inside in units_in(module))
        if unit.root is None
        else ()
    )
    root = Root(list(units)) if unit.root is None else unit.root
    assert isinstance(root, Root)
    return root


def follow_user_changes(units: Sequence[Unit]) -> None:
    """Follows `requires_grad`, hooks gradients, and refuses other changes of parameters since the last pass."""
    with as_local():
        _follow_trainable([buffer for unit in units for buffer in unit.buffers], units)
        for unit in units:
            if not unit.has_registered_names():
                checks.check_registered(unit)
            for number, buffer in enumerate(unit.buffers):
                storage = buffer.shard.untyped_storage()
                for index, param in enumerate(buffer.sharded_params):
                    if param.untyped_storage() is not storage:
                        raise checks.data_replaced(unit, buffer, index)
                    if param._backward_hooks:
                        raise checks.hook_on_shard(buffer, index)
                for index, param in enumerate(buffer.unsharded_params):
                    if param.requires_grad and (number, index) not in unit.hooked:
                        unit.hooked.add((number, index))
                        before_first = functools.partial(pre_accumulate_grads, weakref.ref(unit), number)
                        after_gradient(param, buffer.gradient.make_hook(index, before_first))


def _follow_trainable(buffers: Iterable[FlatBuffer], units: Sequence[Unit]) -> None:
    """Follows `requires_grad`, by which all ranks must train the same parameters."""
    changes = [(buffer, name, trains) for buffer in buffers for name, trains in buffer.follow_trainable().items()]
    if not changes:
        return
    unit_of = {buffer: unit for unit in units for buffer in unit.buffers}
    for buffer, name, trains in changes:
        unit = unit_of.get(buffer)
        # Ranks outside of a unit may hold other parameters, for example experts.
        if unit is None or unit.root is None or unit.rank_suffix:
            continue
        if not checks.is_on_an_axis(unit, unit.root.contract.group):
            unit.root.contract.note_trains(name, trains=trains)


def abort_on_interrupt(unit: Unit, error: BaseException) -> None:
    """Aborts the pass that this unit has begun, if it has, where Ctrl-C or a signal cuts it off.

    torch calls `post_forward` where an `Exception` is raised, and not for other errors: the model would keep
    full parameters, and the memory of all that is gathered, until its next forward.
    """
    root = unit.root
    if isinstance(error, Exception) or not isinstance(root, Root) or root.entry_unit is not unit:
        return
    try:
        root.abort(error)
    except Exception as other:  # The user who has interrupted wants to see that, not this.
        error.add_note(f"the other ranks could not be reached: {other}")


def guard(unit: Unit, module: nn.Module) -> None:
    """Before `module`, which holds parameters of a unit that does not run, computes: they must not be shards.

    In a backward pass it is computed again, by a checkpoint in the unit. No output has announced that pass where the
    unit has returned an object of a class that torch does not know, or where the loss is one of other tensors.
    """
    if in_backward() and unit.pending_backwards > 0 and not unit.in_backward and unit.root is not None:
        with torch.no_grad():  # As autograd's own hooks run; the checkpoint has enabled gradients.
            pre_backward(unit, unit.forward_calls.shard_versions, unit.forward_calls)
    else:
        checks.check_not_sharded(unit, module)


class ShardGuard:
    """Forward pre-hook of a module inside a unit: refuses to compute with shards, past the unit."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit

    def __call__(self, module: nn.Module, _: object) -> None:
        if not self.unit.use_count:
            guard(self.unit, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardGuard:
        """Copies the guard with its unit, never the unit for the guard's sake."""
        if id(self.unit) not in memo:
            raise checks.copied_without_unit(self.unit)
        return ShardGuard(memo[id(self.unit)])


def guarded_forward(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns the class's forward, made to refuse to run on shards, and to abort its pass where it is interrupted."""

    @functools.wraps(cls.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        unit: Unit | None = self.__dict__.get(UNIT)
        if unit is not None and not unit.use_count:
            guard(unit, self)
        try:
            return cls.forward(self, *args, **kwargs)
        except BaseException as error:
            if unit is not None:
                abort_on_interrupt(unit, error)
            raise

    return forward


def _begin_forward(unit: Unit, method: str) -> Root:
    unit.error_at_entry = sys.exc_info()[1]
    root = root_of(unit)
    if root.in_backward:
        root.recover()
    if root.entry_unit is unit:
        root.abort(RuntimeError(f"the forward pass of {unit_title(unit.name)} before this one was cut off"))
    if root.entry_unit is None and not root.in_backward:
        root.begin_forward(unit, method)
        follow_user_changes(root.units)
        root.escaped_tensors = _new_search(root)
    return root


def _new_search(root: Root) -> EscapedTensorSearch | None:
    """A search for the first forward of each kind that has a backward."""
    kind = root.contract.history.current.kind
    return EscapedTensorSearch() if kind.grad and kind not in root.searched_kinds else None


def _begin_escaped_backward(unit: Unit) -> None:
    unit.has_escaped_tensors = True
    pre_backward(unit, unit.forward_calls.shard_versions, unit.forward_calls)


def _begin_backward(root: Root) -> None:
    """The first hook of a backward pass."""
    _follow_trainable(root.buffers, root.units)  # Parameters frozen since the forward get no gradient any more.
    root.begin_backward()
    register_post_backward(functools.partial(finalize_backward, root), root.on_backward_failed)


def _post_failed_forward(unit: Unit, root: Root, error: BaseException) -> None:
    recomputed = root.in_backward and unit.in_backward
    if recomputed and compat.ends_recomputation(error):
        root.on_recomputed()
    elif recomputed:
        root.failure = error  # Autograd does not pass it on.
    else:
        root.reshard(unit)
    if root.entry_unit is unit:
        root.abort(error)
