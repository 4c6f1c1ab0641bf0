"""One unit: a module whose parameters are gathered before it runs, released after, and reduced after its backward.

The methods stand in the order of time: `before_forward`, `after_forward`, `before_backward`, `after_gradient`,
`after_backward`, `finish`. Below them stands what they are made of; their verbs, as `gather` and `reduce`, are those of
`scale_core.flat`, said to all buffers of the unit by `transfers.py`. The order among units, what is fetched ahead and
what all units of a model share is in `root.py`; the messages are in `scale_core.collectives`.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core import compat
from scale_core.backward import after_backward, after_gradient, before_backward, own_outputs
from scale_core.events import unit_title
from scale_core.flat import FlatBuffer
from scale_core.nested import map_tensors
from scale_fsdp.checks import (
    check_no_gradients,
    check_same_model,
    check_unchanged,
    refuse_hooks,
    refuse_second_derivatives,
)
from scale_fsdp.options import UnitOptions
from scale_fsdp.root import Root
from scale_fsdp.slots import Slot, show_shards, show_wholes
from scale_fsdp.transfers import Transfers

_UNIT = "_scale_unit"
_LASTING = (
    "module",
    "slots",
    "buffers",
    "lenders",
    "options",
    "name",
    "lends",
    "reshard_after_forward",
    "reshard_after_backward",
    "synchronizes",
    "fetches",
)


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` has made of this very module, or None."""
    unit: Unit | None = module.__dict__.get(_UNIT)
    return unit


def units_in(module: nn.Module) -> list[Unit]:
    """Returns the units of a module and all that it holds, the outermost first."""
    return [unit for child in module.modules() if (unit := unit_of(child)) is not None]


class Unit(Transfers):
    """The sharded life of one module.

    Args:
        module: The module; its nested units are not part of this one.
        slots: Every place in it that holds a parameter of this unit, or of a unit that it shares one with.
        buffers: This unit's own parameters, one flat buffer per dtype and kind.
        lenders: The units that own the parameters which this one shares.
        options: How it was sharded.

    Attributes:
        calls: Forward calls whose backward has not come yet in this pass.
        uses: Reasons to be gathered right now: its own forward, its own backward, a borrower's.
        in_backward: Between the first gradient at its outputs and the last at its inputs.
        lends: Another unit shares one of its parameters.
        hidden: It has run and returned nothing through which its backward could be seen to come.
        summoned: Inside `summon_full_params`.
        reshard_after_forward: Release between forward and backward, all of it or all but a part.
        reshard_after_backward: Release after the backward.
        synchronizes: Its gradients are reduced at the end of a backward pass, unless the root says otherwise.
        pinned: Gathered by hand, until `reshard`.
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
        self._hooked: set[tuple[int, int]] = set()
        self.lends = False
        self.hidden = False
        self.summoned = False
        self.reshard_after_backward = True
        self.synchronizes = True
        self.pinned = False
        self.fetches: dict[str, list[Unit]] = {}
        self._inputs_tell = False  # In this pass an input's gradient has said that a call's backward is over.
        self._error_at_entry: BaseException | None = None
        show_shards(self.slots)
        module.__dict__[_UNIT] = self

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle take along: how it was made and set, and nothing of a pass or of other ranks."""
        # Numbers of hooks are counted in each process: those that are added later must not be given the same.
        return {name: getattr(self, name) for name in _LASTING} | {"next hook": RemovableHandle.next_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["module"], (), state["buffers"], state["lenders"], state["options"])  # type: ignore[misc]
        for name in _LASTING:
            setattr(self, name, state[name])
        if not any(buffer.is_meta for buffer in self.buffers):
            groups = self.options.ranks.with_part(self.options.reshard_after_forward)
            for buffer in self.buffers:
                buffer.groups = groups
        RemovableHandle.next_id = max(RemovableHandle.next_id, state["next hook"])
        cast(Any, self.module)._make_known()

    @property
    def is_whole(self) -> bool:
        """Whether it has its state: a copy, or what is read from a file, is first made and then filled."""
        return "fetches" in vars(self)

    # The step, in the order of time.

    @compat.untraced
    def before_forward(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, method: str = ""
    ) -> tuple[Any, Any]:
        """The module, or a registered method of it, is about to run: gather, and fetch the next unit ahead."""
        if self.summoned:
            check_no_gradients(self)
            return args, kwargs
        root = self._enter(method)
        recomputing = root.in_backward
        root.announce("recomputation" if recomputing else "forward", self)
        if not (recomputing and self.in_backward):
            self._open()
        args, kwargs = self._cast_inputs((args, kwargs))
        if torch.is_grad_enabled() and not (recomputing and self.calls):
            (args, kwargs), _ = after_backward((args, kwargs), self.after_backward)
            self.calls += 1
        return args, kwargs

    @compat.untraced
    def after_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """The module has run, or failed: release, and be told when its backward comes."""
        if self.summoned or self.root is None:  # Without a root it has failed before it began.
            return output
        root = self.root
        error = sys.exc_info()[1]
        if error is not None and error is not self._error_at_entry:
            return self._after_failed_forward(root, error)
        if self.precision.output_dtype is not None:
            output = _cast(output, self.precision.output_dtype)
        if self._recomputed_for_its_backward:
            root.recomputed()
            return output  # Recomputed for its own backward, which needs the parameters now.
        root.note_output(self, output)
        if torch.is_grad_enabled():
            output = own_outputs(output)
            seen = before_backward(output, functools.partial(self.before_backward, self._versions()))
            # Where no output could be found, nobody will say when the backward comes: nothing is released until then.
            self.hidden = self.hidden or (not seen and self.trains)
        self._close(keep=root.keeps_after_forward(self))
        root.leave(self)
        return output

    def before_backward(self, versions: Sequence[int]) -> None:
        """A gradient has arrived at the module's outputs: gather, and fetch the unit before it ahead.

        Args:
            versions: Those of the shards when the module ran.
        """
        root = self._the_root
        refuse_second_derivatives(self)
        root.begin_backward()
        check_unchanged(self, versions, self._versions())
        if not self.in_backward:
            self.in_backward = True
            root.announce("backward", self)
            self._open()

    def after_gradient(self, number: int, index: int) -> None:
        """A gradient of one of its parameters is whole: moves it to where it waits for the reduction."""
        root = self._the_root
        root.begin_backward()
        gradient = self.buffers[number].gradient
        if not gradient.has_begun:
            root.make_room()
        root.note_gradient(self, number, index)
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
        self.calls = self.calls if self.hidden else 0
        self.uses = 0
        self._inputs_tell = False

    # What the step is made of.

    def follow_trainable(self) -> None:
        """Takes over what the user has frozen or unfrozen, and listens to what trains."""
        for number, buffer in enumerate(self.buffers):
            buffer.follow_trainable()
            refuse_hooks(buffer)
            for index, whole in enumerate(buffer.wholes):
                if whole.requires_grad and (number, index) not in self._hooked:
                    self._hooked.add((number, index))
                    after_gradient(whole, self._listener(number, index))

    def discard(self) -> None:
        """After an error: back to the shards, whatever was under way; gradients of earlier passes stay."""
        super().discard()
        self.calls = self.uses = 0
        self.in_backward = self.hidden = self.pinned = False
        show_shards(self.slots)

    def move(self) -> None:
        """Its buffers have moved: there are other wholes to listen to, and all ranks have to agree on it anew."""
        self._hooked.clear()
        self.calls = 0
        if self.root is not None:
            self.root.outdated = True

    @property
    def _recomputed_for_its_backward(self) -> bool:
        return self._the_root.in_backward and self.in_backward

    def _enter(self, method: str) -> Root:
        self._error_at_entry = sys.exc_info()[1]
        root = root_of(self)
        root.recover()
        if root.entry is self:
            root.abort(RuntimeError(f"the forward pass of {unit_title(self.name)} before this one was cut off"))
        if root.entry is None and not root.in_backward:
            root.enter(self, method)
        return root

    def _open(self) -> None:
        """Gathers, waits, and puts the whole parameters into the module."""
        root = self._the_root
        for unit in (*self.lenders, self):
            unit.gather()
            unit.uses += 1
        root.fetch_ahead()
        for unit in self.fetches.get("backward" if root.in_backward else "forward", ()):
            check_same_model(self, unit)
            unit.gather()
        for unit in (*self.lenders, self):
            unit.wait_gathered()
        show_wholes(self.slots)

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
        root.reduce(self)

    def _let_go(self, keeps: Callable[[Unit], bool], *, keep_part: bool = False) -> None:
        for unit in (self, *self.lenders):
            unit.uses = max(0, unit.uses - 1)  # A forward that failed before it was gathered had no use yet.
            if not unit.uses and not keeps(unit):
                unit.release(keep_part=keep_part)

    def _versions(self) -> list[int]:
        return [buffer.version for unit in (self, *self.lenders) for buffer in unit.buffers]

    def _after_failed_forward(self, root: Root, error: BaseException) -> None:
        if self._recomputed_for_its_backward and compat.ends_recomputation(error):
            root.recomputed()
        elif self._recomputed_for_its_backward:
            root.failure = error  # Autograd will tell nobody what it was.
        else:
            self._close(keep=False)
        if root.entry is self:
            root.abort(error)

    def _listener(self, number: int, index: int) -> Callable[[Tensor], None]:
        held = weakref.ref(self)  # Autograd holds the hook, and shows nobody what its hooks hold.

        def listen(_: Tensor) -> None:
            unit = held()
            assert unit is not None, "a gradient has come to a unit that is gone"
            unit.after_gradient(number, index)

        return listen

    def _cast_inputs(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        dtype = self.precision.param_dtype
        if dtype is None or not self._the_root.casts_inputs_of(self):
            return inputs
        cast: tuple[Any, Any] = _cast(inputs, dtype)
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


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
