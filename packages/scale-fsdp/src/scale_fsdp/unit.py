"""One unit: a module whose parameters are gathered before it runs, released after, and reduced after its backward.

The methods stand in the order of time: `before_forward`, `after_forward`, `before_backward`, `after_gradient`,
`after_backward`, `finish`. Below them stands what they are made of; their verbs, as `gather` and `reduce`, are those of
`scale_core.flat.buffer`, said to all buffers of the unit by `transfers.py`. The order among units, what is fetched
ahead and what all units of a model share is in `root.py`; the messages are in `scale_core.comm.collectives`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from scale_core import compat
from scale_core.autograd_hooks import GradientListeners, after_backward, before_backward, own_outputs
from scale_core.consistency.execution_order import unit_title
from scale_core.flat.buffer import FlatBuffer
from scale_fsdp.api import UnitOptions, cast_floating
from scale_fsdp.checks import (
    check_no_gradients,
    check_not_overwritten,
    check_own_parameters,
    check_same_model,
    check_unchanged,
    refuse_hooks,
    refuse_second_derivatives,
)
from scale_fsdp.interrupts import ending_where_interrupted
from scale_fsdp.lasting import lasting_state, restore
from scale_fsdp.root import Root
from scale_fsdp.slots import Slot, show_shards, show_wholes
from scale_fsdp.transfers import Transfers

_UNIT = "_scale_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` has made of this very module, or None."""
    unit: Unit | None = module.__dict__.get(_UNIT)
    return unit


def units_in(module: nn.Module) -> list[Unit]:
    """Returns the units of a module and all that it holds, the outermost first."""
    return [unit for child in module.modules() if (unit := unit_of(child)) is not None]


@dataclass
class _Calls:
    """The forward calls of a unit in one pass whose backward can come."""

    number: int = 0


class Unit(Transfers):
    """The sharded life of one module.

    Args:
        module: The module; its nested units are not part of this one.
        slots: Every place in it that holds a parameter of this unit, or of a unit that it shares one with.
        buffers: This unit's own parameters, one flat buffer per dtype and kind.
        lenders: The units that own the parameters which this one shares.
        options: How it was sharded.

    Attributes:
        calls: Forward calls whose backward has not come yet.
        uses: Reasons to be gathered right now: its own forward, its own backward, a borrower's.
        in_backward: Between the first gradient at its outputs and the last at its inputs.
        lends: Another unit shares one of its parameters.
        hidden: It has run and returned nothing through which its backward could be seen to come.
        summoned: Inside `summon_full_params`.
        reshard_after_forward: Release between forward and backward, all of it or all but a part.
        reshard_after_backward: Release after the backward.
        synchronizes: Its gradients are reduced at the end of a backward pass, unless the root says otherwise.
        pinned: Gathered by hand, until `reshard`.
        number: Of the units that were made over its ranks, in their order, which is the same on all of these.
        of_ranks: What its parameters' names end in, where other ranks have other parameters in their places.
        buffer_dtypes: Those that the module's buffers have in the plain model, where the policy names another one.
        fetches: What the user wants to be gathered ahead when it is opened in a "forward" and in a "backward".
    """

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[Slot],
        buffers: Sequence[FlatBuffer],
        lenders: Sequence[Unit],
        options: UnitOptions,
    ) -> None:
        super().__init__(buffers, options)
        self.module = module
        self.slots, self.lenders = list(slots), list(lenders)
        self.precision = options.precision
        self.reshard_after_forward = options.ranks.releases(options.reshard_after_forward)
        self.calls = 0
        self.uses = 0
        self.in_backward = False
        self.lends = False
        self.hidden = False
        self.summoned = False
        self.reshard_after_backward = True
        self.synchronizes = True
        self.pinned = False
        self.number = 0
        self.of_ranks = ""
        self.buffer_dtypes: dict[str, torch.dtype] = {}
        self.fetches: dict[str, list[Unit]] = {}
        self._in_pass = _Calls()
        self._had_backward = False  # Since the last forward pass began.
        self._inputs_tell = False  # In this pass an input's gradient has said that a call's backward is over.
        self._error_at_entry: BaseException | None = None
        self._listeners = GradientListeners(self.after_gradient)
        show_shards(self.slots)
        module.__dict__[_UNIT] = self

    def __getstate__(self) -> dict[str, Any]:
        return lasting_state(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        restore(self, state)

    # The step, in the order of time.

    @compat.untraced
    @ending_where_interrupted
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: str = ""
    ) -> tuple[Any, Any]:
        """The module, or a registered method of it, is about to run: gather, and fetch the next unit ahead."""
        if self.summoned:
            check_no_gradients(self)
            return args, kwargs
        root = self._enter(method)
        check_own_parameters(self)
        recomputing = root.backward.runs
        root.announce("recomputation" if recomputing else "forward", self)
        if not (recomputing and self.in_backward):
            self._open()
        args, kwargs = self._cast_inputs((args, kwargs))
        if torch.is_grad_enabled() and not (recomputing and self.calls):
            (args, kwargs), _ = after_backward((args, kwargs), self.after_backward)
            self.calls += 1
            self._in_pass.number += 1
        return args, kwargs

    @compat.untraced
    @ending_where_interrupted
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The module has run, or failed: release, and be told when its backward comes."""
        if self.summoned or self.root is None:  # Without a root it has failed before it began.
            return output
        root = self.root
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_at_entry:
            return self._after_failed_forward(root, error)
        if self.precision.output_dtype is not None:
            output = cast_floating(output, self.precision.output_dtype)
        if self._recomputed_for_its_backward:
            root.backward.recomputed()
            return output  # Recomputed for its own backward, which needs the parameters now.
        try:
            check_not_overwritten(self)
        except RuntimeError as written:
            self._after_failed_forward(root, written)
            raise
        root.note_output(self, output)
        if torch.is_grad_enabled():
            output = own_outputs(output)
            seen = before_backward(output, functools.partial(self.before_backward, self._versions(), self._in_pass))
            # Where no output could be found, nobody will say when the backward comes: nothing is released until then.
            self.hidden = self.hidden or (not seen and self.trains)
        self._close(keep=root.keeps_after_forward(self))
        root.leave(self)
        return output

    def before_backward(self, versions: Sequence[int], calls: _Calls) -> None:
        """A gradient has arrived at the module's outputs: gather, and fetch the unit before it ahead.

        Args:
            versions: Those of the shards when the module ran.
            calls: Those of the forward pass in which it ran.
        """
        root = self._the_root
        refuse_second_derivatives(self)
        root.backward.begin()
        check_unchanged(self, versions, self._versions())
        if not self.in_backward:
            self.in_backward = True
            # Where none is left, this graph was kept from an earlier pass, or lived through a forward after one.
            self.calls = max(self.calls, 0) or calls.number
            root.announce("backward", self)
            self._open()

    def after_gradient(self, number: int, index: int) -> None:
        """A gradient of one of its parameters is whole: moves it to where it waits for the reduction."""
        root = self._the_root
        root.backward.begin()
        gradient = self.buffers[number].gradient
        if not gradient.has_begun:
            root.backward.make_room()
        root.backward.note_gradient(self, number, index)
        gradient.hold(index, accumulate=not root.reduces(self))

    def after_backward(self) -> None:
        """The gradients of one call's inputs are there; after the last call's, release and reduce."""
        self.calls -= 1
        self._inputs_tell = True
        if self.in_backward and self.calls <= 0 and not self.lends:
            self._end_backward()

    def finish(self) -> None:
        """The whole backward pass has ended: do now what no gradient at an input has told us to do."""
        if self.in_backward:
            self._end_backward()
        # The backward of another call may come in a later pass; nobody would say so, so it stays gathered until then.
        self.hidden = self.hidden and self._inputs_tell and self.calls > 0
        self._had_backward = True
        self.uses = 0
        self._inputs_tell = False

    # What the step is made of.

    def begin(self) -> None:
        """A forward pass begins, with whichever unit."""
        if self._had_backward and not self.hidden:
            self.calls = 0  # Whatever has had no backward by now, as what an evaluation has returned, gets none.
        self._had_backward, self._in_pass = False, _Calls()
        self.follow_trainable()

    def follow_trainable(self) -> None:
        """Takes over what the user has frozen or unfrozen, and listens to what trains."""
        for buffer in self.buffers:
            buffer.follow_trainable()
            refuse_hooks(buffer)
        self._listeners.listen([buffer.wholes for buffer in self.buffers])

    def discard(self) -> None:
        """After an error: back to the shards, whatever was under way; gradients of earlier passes stay."""
        super().discard()
        self.calls = self.uses = 0
        self.in_backward = self.hidden = self.pinned = False
        show_shards(self.slots)

    def move(self) -> None:
        """Its buffers have moved: there are other wholes to listen to, and all ranks have to agree on it anew."""
        self._listeners.forget()
        self.calls = 0
        if self.root is not None:
            self.root.outdated = True

    @property
    def _recomputed_for_its_backward(self) -> bool:
        return self._the_root.backward.runs and self.in_backward

    def _enter(self, method: str) -> Root:
        self._error_at_entry = sys.exc_info()[1]
        root = root_of(self)
        root.recover()
        if root.entry is self:
            root.abort(RuntimeError(f"the forward pass of {unit_title(self.name)} before this one was cut off"))
        if root.entry is None and not root.backward.runs:
            root.enter(self, method)
        return root

    def _open(self) -> None:
        """Gathers, waits, and puts the whole parameters into the module."""
        root = self._the_root
        root.opening = opening = self._to_gather()
        for unit in opening:
            unit.gather()
        root.opening = []
        for unit in (*self.lenders, self):
            unit.uses += 1
            unit.wait_gathered()
        show_wholes(self.slots)

    def _to_gather(self) -> list[Unit]:
        """What is gathered when it opens, in this order: what it computes with, and what is fetched ahead."""
        root = self._the_root
        by_hand = self.fetches.get("backward" if root.backward.runs else "forward", [])
        if root.outermost.name:  # A part of a model that was entered, or copied, by itself, without the rest.
            by_hand = [unit for unit in by_hand if unit.root is root]
        for unit in by_hand:
            check_same_model(self, unit)
        return [*self.lenders, self, *root.fetched_ahead(), *by_hand]

    def _close(self, *, keep: bool) -> None:
        """Puts the shards back into the module, and releases what nobody uses any more."""
        self._let_go(lambda unit: keep or self._the_root.keeps_after_forward(unit), keep_part=torch.is_grad_enabled())
        if not self.uses and not self.pinned:
            show_shards(self.slots)

    def _end_backward(self) -> None:
        root = self._the_root
        self.in_backward = False
        self._let_go(root.keeps_after_backward)
        if not self.pinned:
            show_shards(self.slots)
        root.backward.reduce(self)

    def _let_go(self, keeps: Callable[[Unit], bool], *, keep_part: bool = False) -> None:
        for unit in (self, *self.lenders):
            unit.uses = max(0, unit.uses - 1)  # A forward that failed before it was gathered had no use yet.
            if not unit.uses and not keeps(unit):
                unit.release(keep_part=keep_part)
            if unit is not self and not unit.uses and not unit.pinned:
                show_shards(unit.slots)  # It ran inside this one, and stayed open for it.

    def _versions(self) -> list[int]:
        return [buffer.version for unit in (self, *self.lenders) for buffer in unit.buffers]

    def _after_failed_forward(self, root: Root, error: BaseException) -> None:
        if self._recomputed_for_its_backward and compat.ends_recomputation(error):
            root.backward.recomputed()
        elif self._recomputed_for_its_backward:
            root.backward.failure = error  # Autograd will tell nobody what it was.
        else:
            self._close(keep=False)
        if root.entry is self:
            root.abort(error)

    def _cast_inputs(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        dtype = self.precision.param_dtype
        if dtype is None or not self._the_root.casts_inputs_of(self):
            return inputs
        cast: tuple[Any, Any] = cast_floating(inputs, dtype)
        return cast


def root_of(unit: Unit) -> Root:
    """Returns what a unit shares with the others of its model; one that has no root yet becomes the outermost."""
    if unit.root is not None and unit.root.outdated:
        unit.root.recover()
        for member in unit.root.units:
            member.root = None
    if unit.root is None:
        unit.root = Root(unit, units_in(unit.module))
    return unit.root
