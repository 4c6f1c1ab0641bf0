"""One step of a unit, in the order of time: the page to read first.

torch calls `pre_forward` and `post_forward` around the module. Autograd calls `pre_backward`, `post_accumulate_grad`
and `post_backward`, and at the end of the whole pass `finalize_backward`. They say when; what a unit does is in
`unit.py`, the order among units in `root.py`, what a backward pass is made of and how any pass ends in `backward.py`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from scale_core import compat
from scale_core.autograd_hooks import after_backward, after_gradient, at_end_of_backward, before_backward, own_outputs
from scale_core.consistency.execution_order import unit_title
from scale_fsdp.api import cast_floating
from scale_fsdp.backward import BackwardRoot
from scale_fsdp.checks import (
    check_no_gradients,
    check_not_overwritten,
    check_own_parameters,
    check_same_model,
    check_unchanged,
    refuse_hooks,
    refuse_second_derivatives,
)
from scale_fsdp.unit import ForwardCalls, Unit, units_in


@compat.untraced
def pre_forward(
    unit: Unit, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: str = ""
) -> tuple[Any, Any]:
    """The module, or a registered method of it, is about to run: gather, and prefetch the next unit."""
    if unit.in_summon:
        check_no_gradients(unit)
        return args, kwargs
    try:
        root = _begin_forward(unit, method)
        check_own_parameters(unit)
        recomputing = root.in_backward
        root.announce("recomputation" if recomputing else "forward", unit)
        if not (recomputing and unit.in_backward):
            _unshard(unit, root)
        dtype = unit.precision.param_dtype
        if dtype is not None and root.casts_inputs_of(unit):
            args, kwargs = cast_floating((args, kwargs), dtype)
        if torch.is_grad_enabled() and not (recomputing and unit.pending_backwards):
            (args, kwargs), _ = after_backward((args, kwargs), functools.partial(post_backward, unit))
            unit.pending_backwards += 1
            unit.calls_in_pass.number += 1
        return args, kwargs
    except BaseException as error:
        abort_on_interrupt(unit, error)
        raise


@compat.untraced
def post_forward(unit: Unit, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
    """The module has run, or failed: release, and be told when its backward comes."""
    root = unit.root
    if unit.in_summon or root is None:  # Without a root it has failed before it began.
        return output
    assert isinstance(root, BackwardRoot)
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
        try:
            check_not_overwritten(unit)
        except RuntimeError as written:
            _post_failed_forward(unit, root, written)
            raise
        if root.nonfinite is not None and not root.in_backward and root.contract.history.current.kind.grad:
            root.nonfinite.note_output(unit, output)
        if torch.is_grad_enabled():
            output = own_outputs(output)
            callback = functools.partial(pre_backward, unit, unit.versions, unit.calls_in_pass)
            seen = before_backward(output, callback)
            # Where no output could be found, nobody will say when the backward comes: nothing is released until then.
            unit.backward_unobserved = unit.backward_unobserved or (not seen and unit.trains)
        _reshard(unit, root, keep=root.keeps_after_forward(unit))
        root.leave(unit)
        return output
    except BaseException as error:
        abort_on_interrupt(unit, error)
        raise


def pre_backward(unit: Unit, versions: Sequence[int], calls: ForwardCalls) -> None:
    """A gradient has arrived at the module's outputs: gather, and prefetch the unit before it.

    Args:
        unit: The unit.
        versions: Those of the shards when the module ran.
        calls: Those of the forward pass in which it ran.
    """
    root = unit.root
    assert isinstance(root, BackwardRoot)
    refuse_second_derivatives(unit)
    if not root.in_backward:
        _begin_backward(root)
    check_unchanged(unit, versions)
    if not unit.in_backward:
        unit.in_backward = True
        # Where none is left, this graph was kept from an earlier pass, or lived through a forward after one.
        unit.pending_backwards = max(unit.pending_backwards, 0) or calls.number
        root.announce("backward", unit)
        _unshard(unit, root)


def post_accumulate_grad(held: weakref.ref[Unit], number: int, index: int, param: Tensor) -> None:
    """A gradient of one of its parameters is whole: moves it to where it waits for the reduction."""
    unit = held()  # Autograd holds the hook, and shows nobody what it holds.
    assert unit is not None, "a gradient has come whose unit is gone"
    root, gradient = unit.root, unit.buffers[number].gradient
    assert isinstance(root, BackwardRoot)
    if not root.in_backward:
        _begin_backward(root)
    if root.reducing is not None and not gradient.has_begun:
        root.wait_previous_reduction()
    if root.nonfinite is not None:
        root.nonfinite.note_gradient(unit, number, index)
    gradient.hold(index, accumulate=not root.reduces(unit))


def post_backward(unit: Unit) -> None:
    """The gradients of one call's inputs are there; after the last call's, release and reduce."""
    unit.pending_backwards -= 1
    unit.inputs_tell = True
    if unit.in_backward and unit.pending_backwards <= 0 and not unit.is_shared:
        assert isinstance(unit.root, BackwardRoot)
        _reshard_and_reduce(unit, unit.root)


def finalize_backward(root: BackwardRoot) -> None:
    """The pass has run to its end on this rank: does what no gradient at an input has told to do, and commits."""
    try:
        for unit in root.units:
            if unit.in_backward:
                _reshard_and_reduce(unit, root)
            unit.end_backward()
        root.finish()
    except BaseException as error:
        root.abort(error)
        raise
    root.in_backward = False
    root.reshard_idle()


# What the step is made of.


def root_of(unit: Unit) -> BackwardRoot:
    """Returns what a unit shares with the others of its model; one that has no root yet becomes the outermost."""
    if unit.root is not None and unit.root.stale:
        unit.root.recover()
        for member in unit.root.units:
            member.root = None
    root = BackwardRoot(units_in(unit.module)) if unit.root is None else unit.root
    assert isinstance(root, BackwardRoot)
    return root


def follow_trainable(unit: Unit) -> None:
    """Takes over what the user has frozen or unfrozen, and hooks the gradients of what trains."""
    for number, buffer in enumerate(unit.buffers):
        buffer.follow_trainable()
        refuse_hooks(buffer)
        for index, whole in enumerate(buffer.wholes):
            if whole.requires_grad and (number, index) not in unit.hooked:
                unit.hooked.add((number, index))
                after_gradient(whole, functools.partial(post_accumulate_grad, weakref.ref(unit), number, index))


def abort_on_interrupt(unit: Unit, error: BaseException) -> None:
    """Ends the pass that was entered by this unit, if one was, where Ctrl-C or a signal cuts it off.

    torch calls `post_forward` where an `Exception` is raised, and goes past it on what is none. The model would keep
    whole parameters, and the memory of all that is gathered, until its next forward found out.
    """
    root = unit.root
    if isinstance(error, Exception) or not isinstance(root, BackwardRoot) or root.entry_unit is not unit:
        return
    try:
        root.abort(error)
    except Exception as other:  # Whoever has interrupted wants to see that, and not what the others make of it.
        error.add_note(f"the other ranks could not be told: {other}")


def _begin_forward(unit: Unit, method: str) -> BackwardRoot:
    unit.error_at_entry = sys.exc_info()[1]
    root = root_of(unit)
    root.recover()
    if root.entry_unit is unit:
        root.abort(RuntimeError(f"the forward pass of {unit_title(unit.name)} before this one was cut off"))
    if root.entry_unit is None and not root.in_backward:
        root.enter(unit, method)
        for member in root.units:
            follow_trainable(member)
    return root


def _begin_backward(root: BackwardRoot) -> None:
    """The first hook of a backward pass."""
    root.begin_backward()
    at_end_of_backward(functools.partial(finalize_backward, root), root.fail)


def _unshard(unit: Unit, root: BackwardRoot) -> None:
    """Gathers, waits, and puts the whole parameters into the module."""
    root.starting_gathers = gathers = _gather_order(unit, root)
    for each in gathers:
        each.gather()
    root.starting_gathers = []
    for each in (*unit.shared_owners, unit):
        each.use_count += 1
        each.wait_gathered()
    unit.to_unsharded()


def _gather_order(unit: Unit, root: BackwardRoot) -> list[Unit]:
    """What is gathered when it opens, in this order: what it computes with, and what is prefetched."""
    by_hand = unit.prefetch.get("backward" if root.in_backward else "forward", [])
    if root.outermost.name:  # A part of a model that was entered, or copied, by itself, without the rest.
        by_hand = [other for other in by_hand if other.root is root]
    for other in by_hand:
        check_same_model(unit, other)
    return [*unit.shared_owners, unit, *root.next_prefetch(), *by_hand]


def _reshard(unit: Unit, root: BackwardRoot, *, keep: bool) -> None:
    """After a forward: puts the shards back into the module, and releases what nobody uses any more."""
    _release(unit, lambda each: keep or root.keeps_after_forward(each), keep_part=torch.is_grad_enabled())
    if not unit.use_count and not unit.kept_unsharded:
        unit.to_sharded()


def _reshard_and_reduce(unit: Unit, root: BackwardRoot) -> None:
    """After a backward."""
    unit.in_backward = False
    _release(unit, root.keeps_after_backward)
    if not unit.kept_unsharded:
        unit.to_sharded()
    root.reduce(unit)


def _release(unit: Unit, keeps: Callable[[Unit], bool], *, keep_part: bool = False) -> None:
    for each in (unit, *unit.shared_owners):
        each.use_count = max(0, each.use_count - 1)  # A forward that failed before it was gathered had no use yet.
        if not each.use_count and not keeps(each):
            each.release(keep_part=keep_part)
        if each is not unit and not each.use_count and not each.kept_unsharded:
            each.to_sharded()  # It ran inside this one, and stayed open for it.


def _post_failed_forward(unit: Unit, root: BackwardRoot, error: BaseException) -> None:
    recomputed = root.in_backward and unit.in_backward
    if recomputed and compat.ends_recomputation(error):
        root.on_recomputed()
    elif recomputed:
        root.failure = error  # Autograd will tell nobody what it was.
    else:
        _reshard(unit, root, keep=False)
    if root.entry_unit is unit:
        root.abort(error)
