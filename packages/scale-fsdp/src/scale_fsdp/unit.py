"""One unit: a module whose parameters are gathered before it runs, released after, and reduced after its backward.

Here is a unit's state: its flat buffers, their places in the module tree, and what moves them (`gather`, `release`,
`reduce`), together and on record; and the data that all units of one model share. `root.py` knows the order among
units, `backward.py` their backward pass, and `step.py`, the page to read first, calls all of them.

Every transfer is entered into the history when it has begun, buffer by buffer: from it a rank that fails, as for want
of memory for that very transfer, knows what the others still expect of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, message_tag, unit_title
from scale_core.flat.buffer import FlatBuffer, State
from scale_fsdp.api import UnitOptions
from scale_fsdp.flattened_parameter import FlattenedParameter, flattened_parameter

_UNIT = "_scale_unit"
# What deepcopy and pickle take along: how it was made and set, nothing of a pass that runs or of other ranks.
_KEPT = (
    "module",
    "slots",
    "buffers",
    "shared_owners",
    "options",
    "name",
    "is_shared",
    "reshard_after_forward",
    "reshard_after_backward",
    "synchronizes",
    "number",
    "buffer_dtypes",
    "of_ranks",
    "prefetch",
)


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` has made of this very module, or None."""
    unit: Unit | None = module.__dict__.get(_UNIT)
    return unit


def units_in(module: nn.Module) -> list[Unit]:
    """Returns the units of a module and all that it holds, the outermost first."""
    return [unit for child in module.modules() if (unit := unit_of(child)) is not None]


class Slot(NamedTuple):
    """A place in the module tree where a parameter stands: `module.attribute`."""

    module: nn.Module
    attribute: str
    buffer: FlatBuffer
    number: int


@dataclass
class ForwardCalls:
    """The forward calls of a unit in one pass whose backward can come."""

    number: int = 0


class Unit:
    """The sharded life of one module.

    Args:
        module: The module; its nested units are not part of this one.
        slots: Every place in it that holds a parameter of this unit, or of a unit that it shares one with.
        buffers: This unit's own parameters, one flat buffer per dtype and kind.
        shared_owners: The units that own the parameters which this one shares.
        options: How it was sharded.

    Attributes:
        name: The unit's name in its model.
        root: What the units of the model share; set when the model first runs.
        contract: That of the root.
        pending_backwards: Forward calls whose backward has not come yet.
        calls_in_pass: Those of the forward pass that runs now, or ran last.
        use_count: Reasons to be gathered right now: its own forward, its own backward, a borrower's.
        in_backward: Between the first gradient at its outputs and the last at its inputs.
        had_backward: Since the last forward pass began.
        inputs_tell: In this pass an input's gradient has said that a call's backward is over.
        is_shared: Another unit shares one of its parameters.
        backward_unobserved: It has run and returned nothing through which its backward could be seen to come.
        in_summon: Inside `summon_full_params`.
        reshard_after_forward: Release between forward and backward, all of it or all but a part.
        reshard_after_backward: Release after the backward.
        synchronizes: Its gradients are reduced at the end of a backward pass, unless the root says otherwise.
        kept_unsharded: Gathered by hand, until `reshard`.
        number: Of the units that were made over its ranks, in their order, which is the same on all of these.
        of_ranks: What its parameters' names end in, where other ranks have other parameters in their places.
        buffer_dtypes: Those that the module's buffers have in the plain model, where the policy names another one.
        prefetch: What the user wants to be gathered ahead when it is opened in a "forward" and in a "backward".
        hooked: The parameters whose gradients are hooked, by the numbers of buffer and parameter.
        error_at_entry: What was being handled when its forward began.
    """

    contract: Contract

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[Slot],
        buffers: Sequence[FlatBuffer],
        shared_owners: Sequence[Unit],
        options: UnitOptions,
    ) -> None:
        self.module, self.slots = module, list(slots)
        self.buffers, self.shared_owners = list(buffers), list(shared_owners)
        self.options, self.precision = options, options.precision
        self.reshard_after_forward = options.ranks.releases(options.reshard_after_forward)
        self.name = ""
        self.root: UnitContext | None = None
        self.pending_backwards = self.use_count = self.number = 0
        self.calls_in_pass = ForwardCalls()
        self.in_backward = self.had_backward = self.inputs_tell = False
        self.is_shared = self.backward_unobserved = self.in_summon = self.kept_unsharded = False
        self.reshard_after_backward = self.synchronizes = True
        self.of_ranks = ""
        self.buffer_dtypes: dict[str, torch.dtype] = {}
        self.prefetch: dict[str, list[Unit]] = {}
        self.hooked: set[tuple[int, int]] = set()
        self.error_at_entry: BaseException | None = None
        self.to_sharded()
        module.__dict__[_UNIT] = self

    def __getstate__(self) -> dict[str, Any]:
        # Numbers of hooks are counted in each process: those that are added later must not be given the same.
        return {name: getattr(self, name) for name in _KEPT} | {"next hook": RemovableHandle.next_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Unit.__init__(self, state["module"], (), state["buffers"], state["shared_owners"], state["options"])
        for name in _KEPT:
            setattr(self, name, state[name])
        if not any(buffer.is_meta for buffer in self.buffers):
            groups = self.options.ranks.with_part(self.options.reshard_after_forward)
            for buffer in self.buffers:
                buffer.groups = groups
        RemovableHandle.next_id = max(RemovableHandle.next_id, state["next hook"])
        cast(Any, self.module)._make_known()

    @property
    def is_restored(self) -> bool:
        """Whether it has its state: a copy, or what is read from a file, is first made and then filled."""
        return "prefetch" in vars(self)

    @property
    def gathered(self) -> bool:
        """Whether a buffer is gathered, or being gathered."""
        return any(buffer.state is not State.SHARDED for buffer in self.buffers)

    @property
    def is_stale(self) -> bool:
        """Whether a shard was written to, as by an optimizer, since it was gathered."""
        return any(buffer.is_stale() for buffer in self.buffers)

    @property
    def trains(self) -> bool:
        """Whether any of its own parameters wants a gradient."""
        return any(buffer.trains for buffer in self.buffers)

    @property
    def versions(self) -> list[int]:
        """Those of the shards that it computes with."""
        return [buffer.version for unit in (self, *self.shared_owners) for buffer in unit.buffers]

    # What stands in the module.

    def to_sharded(self) -> None:
        """Puts the local shards into the module: what everybody sees outside of its forward and backward."""
        for module, attribute, buffer, number in self.slots:
            here = flattened_parameter(buffer, number) if buffer.flatten else buffer.exposed[number]
            set_param(module, attribute, here)

    def to_unsharded(self) -> None:
        """Puts the whole parameters into the module: what it computes with."""
        for module, attribute, buffer, number in self.slots:
            set_param(module, attribute, buffer.wholes[number])

    # A pass.

    def begin_forward(self) -> None:
        """A forward pass begins, with whichever unit."""
        if self.had_backward and not self.backward_unobserved:
            # Whatever has had no backward by now, as what an evaluation has returned, gets none.
            self.pending_backwards = 0
        self.had_backward, self.calls_in_pass = False, ForwardCalls()

    def end_backward(self) -> None:
        """A backward pass has ended, of whichever units."""
        # The backward of another call may come in a later pass; nobody would say so, so it stays gathered until then.
        self.backward_unobserved = self.backward_unobserved and self.inputs_tell and self.pending_backwards > 0
        self.had_backward, self.inputs_tell = True, False
        self.use_count = 0

    def discard(self) -> None:
        """After an error: back to the shards, whatever was under way; gradients of earlier passes stay."""
        for buffer in self.buffers:
            buffer.discard()
        self.pending_backwards = self.use_count = 0
        self.in_backward = self.backward_unobserved = self.kept_unsharded = False
        self.to_sharded()

    def move(self) -> None:
        """Its buffers have moved: there are other wholes to hook, and all ranks have to agree on it anew."""
        self.hooked.clear()
        self.pending_backwards = 0
        if self.root is not None:
            self.root.stale = True

    # Gather and release.

    def gather(self) -> None:
        """Starts to gather all buffers that are not gathered yet."""
        for number, buffer in enumerate(self.buffers):
            if buffer.state is State.SHARDED:
                self._start("gather", number)

    def wait_gathered(self) -> None:
        """Returns when all buffers can be read."""
        with self.contract.waiting(Event("gather", self.name)):
            for buffer in self.buffers:
                buffer.wait_gathered(self.contract.limit_seconds)

    def release(self, *, keep_part: bool = False) -> None:
        """Frees what was gathered, but for a part of it; waits for what was fetched ahead and is not used."""
        if not self.gathered and (keep_part or not any(buffer.part is not None for buffer in self.buffers)):
            return
        with self.contract.waiting(Event("gather", self.name)):
            for buffer in self.buffers:
                buffer.release(self.contract.limit_seconds, keep_part=keep_part)

    def gather_whole(self, buffer: FlatBuffer) -> list[Tensor]:
        """Returns a buffer's parameters whole, in the dtype that they are trained in; all ranks call it together.

        Raises:
            ScaleDistributedError: A rank did something else.
        """
        if self.root is not None:
            self.root.recover()
        event = Event("whole parameters", self.name)
        contract = (
            self.root.contract
            if self.root is not None and not self.root.stale
            else Contract(self.options.ranks.whole, self.options.limit_seconds)
        )
        contract.meet(event)
        with contract.waiting(event):
            return buffer.gather_whole(message_tag(event), contract.limit_seconds)

    # Reduce.

    def pack(self) -> None:
        """Keeps the gradients of this pass for the reduction at the end of a later one."""
        for buffer in self.buffers:
            buffer.gradient.pack(accumulate=True)

    def reduce(self) -> None:
        """Starts to reduce the gradients of all buffers that train."""
        for number, buffer in enumerate(self.buffers):
            if buffer.trains:
                self._start("reduction", number)

    def wait_reduced(self) -> None:
        """Waits for the reductions, so that their flat gradients are free."""
        with self.contract.waiting(Event("reduction", self.name)):
            for buffer in self.buffers:
                buffer.wait_reduced(self.contract.limit_seconds)

    def commit(self) -> None:
        """The pass has gone well on every rank: what was reduced in it now stands in the shards' `grad`.

        What was not reduced joins what waits for a later reduction.
        """
        with self.contract.waiting(Event("reduction", self.name)):
            for buffer in self.buffers:
                buffer.commit(self.contract.limit_seconds)

    def reduced_params(self) -> list[nn.Parameter]:
        """Its local shards that have a gradient."""
        return [param for buffer in self.buffers for param in buffer.exposed if param.grad is not None]

    def drop_gradients(self) -> None:
        """Forgets the gradients that were not reduced yet."""
        for buffer in self.buffers:
            buffer.gradient.drop()

    def revoke_gradients(self) -> None:
        """Forgets the gradients of the pass that runs now; what waits from earlier ones waits on."""
        for buffer in self.buffers:
            buffer.gradient.revoke()

    # For the others, on a rank that has failed.

    def withhold_gradients(self) -> None:
        """Until `discard`, reduces zeros in place of its gradients."""
        for buffer in self.buffers:
            buffer.gradient.withhold()

    def replay(self, transfer: Event, *, keep_part: bool) -> None:
        """Does one buffer's part of a transfer that is on record, for the sake of the others.

        Args:
            transfer: As it was entered into the history.
            keep_part: As in `release`; only for the buffer that is gathered.
        """
        number = int(transfer.unit.rpartition("#")[2])
        buffer, limit = self.buffers[number], self.contract.limit_seconds
        with self.contract.waiting(Event(transfer.phase, self.name)):
            if transfer.phase == "gather":
                if buffer.state is State.SHARDED:
                    self._start("gather", number)
                buffer.release(limit, keep_part=keep_part)
            else:
                self._start("reduction", number)
                buffer.wait_reduced(limit)

    def start_remaining(self, phase: str) -> None:
        """Begins those transfers of the last event, a "gather" or a "reduction", that this rank has not begun."""
        begun = self.contract.history.transfers
        for number, buffer in enumerate(self.buffers):
            if self._transfer(phase, number) not in begun and (
                buffer.state is State.SHARDED if phase == "gather" else buffer.trains
            ):
                self._start(phase, number)

    def end_transfers(self) -> None:
        """Waits for whatever is under way, since the others send it, and keeps no more than the part that they need."""
        self.wait_reduced()
        self.release(keep_part=True)

    def _start(self, phase: str, number: int) -> None:
        transfer, buffer = self._transfer(phase, number), self.buffers[number]
        (buffer.gather if phase == "gather" else buffer.reduce)(message_tag(transfer))
        self.contract.history.add_transfer(transfer)

    def _transfer(self, phase: str, number: int) -> Event:
        """One buffer's, whose messages carry a tag of it: two ranks at different units never read each other's data."""
        return Event(phase, f"{self.name}#{number}")


class UnitContext:
    """What all units of one model share: the data. `Root` and `BackwardRoot` are made of it.

    Args:
        units: All of them, in the order of `named_modules`; the module of the first holds all the others.
        abort_message: Says that a step was given up, as for `Contract`.

    Attributes:
        outermost: The first of them.
        by_name: They by their names.
        contract: Between the ranks that share the model.
        entry_unit: The unit by which the forward pass that runs now was entered; None outside of one.
        in_backward: A backward pass runs now.
        synchronizes: Gradients are reduced at the end of a backward pass; False inside `no_sync`.
        starting_gathers: The units whose gathers begin now, as one of them opens.
        failure: What was raised in the backward pass that runs now, where that is known.
        shared_error: What this rank has raised that all ranks know of.
        stale: Units have moved to another dtype, device or group since they agreed: a new root takes its place.
    """

    def __init__(self, units: Sequence[Unit], abort_message: Callable[[Sequence[str]], str]) -> None:
        self.units = list(units)
        self.outermost = outermost = self.units[0]
        self.by_name = {unit.name: unit for unit in self.units}
        kind, number = type(outermost.module).__name__, outermost.number
        of = f"{unit_title(outermost.name)} ({kind}, number {number} in the order of fully_shard)"
        group = max((unit.options.ranks.whole for unit in self.units), key=lambda group: group.size)
        self.contract = Contract(group, outermost.options.limit_seconds, abort_message, of)
        self.entry_unit: Unit | None = None
        self.in_backward = False
        self.synchronizes = True
        self.starting_gathers: list[Unit] = []
        self.failure: BaseException | None = None
        self.shared_error: BaseException | None = None
        self.stale = False

    def recover(self) -> None:
        """Ends a backward pass that has failed; see `BackwardRoot`."""
        raise NotImplementedError


def paths_in(module: nn.Module) -> dict[int, str]:
    """Returns the qualified name of every module in `module`, by its id; that of `module` itself is ""."""
    return {id(child): path for path, child in module.named_modules()}


def flat_name_of(number: int) -> str:
    """Returns the name under which a module holds the flat parameter of one buffer."""
    return f"flat_param_{number}"


def set_param(module: nn.Module, attribute: str, param: nn.Parameter | FlattenedParameter) -> None:
    """Sets `module.attribute`; one that is shown as a part of a flat tensor is None among the module's parameters."""
    listed = None if isinstance(param, FlattenedParameter) else param
    vars(module).pop(attribute, None)
    if type(module).__setattr__ is not nn.Module.__setattr__:
        # Modules such as nn.LSTM keep a second list of their weights, which their own __setattr__ maintains.
        setattr(module, attribute, listed)
    else:
        module._parameters[attribute] = listed
    if listed is None:
        vars(module)[attribute] = param  # It comes before what is among the parameters.
