"""One unit: a module whose parameters are gathered before it runs, released after, and reduced after its backward.

Here is a unit's state: its flat buffers, the slots of its parameters in the module tree, and their collectives
(`gather`, `release`, `reduce`); and the data that all units of one model share. `root.py` has the order among units,
`step.py`, the page to read first, has the hooks that torch and autograd call.

Every collective is recorded in the history when it has started, buffer by buffer: from that a rank that fails, as for
want of memory for that very collective, knows which collectives the others still expect of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from scale_core.compat import NO_RANGE, profiler_runs
from scale_core.consistency.contract import Contract
from scale_core.consistency.execution_order import Event, LogEntry, message_tag, unit_title
from scale_core.dtensor import DTensorSpec
from scale_core.flat.buffer import FlatBuffer, State
from scale_core.parameters import MemoryRange
from scale_fsdp.api import UnitOptions
from scale_fsdp.runtime.flattened_parameter import FlattenedParameter, flat_param_name, flattened_parameter

UNIT = "_scale_unit"
GATHERING_PHASES = ("forward", "recomputation", "backward")  # the events of a pass for which a unit is gathered
# The attributes that deepcopy and pickle copy: how the unit was made and set, nothing of a pass that runs or of other
# ranks.
_COPIED = (
    "modules",
    "slots",
    "specs",
    "buffers",
    "shared_owners",
    "options",
    "name",
    "is_shared",
    "reshard_after_forward",
    "reshard_after_backward",
    "reshards_entry",
    "synchronizes",
    "serial",
    "buffer_dtypes",
    "rank_suffix",
    "prefetch",
    "ignored",
)


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` has made of this very module, or None."""
    unit: Unit | None = module.__dict__.get(UNIT)
    return unit


def units_in(module: nn.Module) -> list[Unit]:
    """Returns the units of a module and all that it holds, the outermost first."""
    units = (unit for child in module.modules() if (unit := unit_of(child)) is not None)
    return list(dict.fromkeys(units))  # One of several modules comes once.


class ParamSlot(NamedTuple):
    """A place in the module tree that holds a parameter: `module.attribute`."""

    module: nn.Module
    attribute: str
    buffer: FlatBuffer
    number: int


class RegisteredNames(NamedTuple):
    """The content of one module of a unit: its children, and the names of its parameters that are not None."""

    module: nn.Module
    children: tuple[nn.Module | None, ...]
    params: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> RegisteredNames:
        params = tuple([name for name, param in module._parameters.items() if param is not None])
        return cls(module, tuple(module._modules.values()), params)


@dataclass
class ForwardCalls:
    """The forward calls of a unit in one pass that have a backward to come."""

    count: int = 0
    shard_versions: Sequence[int] = ()  # of the shards that the last one computed with


class Unit:
    """The sharded parameters of one module, or of several that are gathered together.

    Args:
        modules: The modules; none is inside another one; their nested units are not part of this one.
        slots: Every place in it that holds a parameter of this unit, or one that another unit owns and this one shares.
        buffers: This unit's own parameters, one flat buffer per dtype and kind (trained or frozen).
        shared_owners: The units that own the parameters which this one shares.
        options: How it was sharded.
        specs: By slot, how a parameter that was a DTensor is made one again; None for a plain one.
    """

    contract: Contract  # of the root

    def __init__(
        self,
        modules: Sequence[nn.Module],
        slots: Sequence[ParamSlot],
        buffers: Sequence[FlatBuffer],
        shared_owners: Sequence[Unit],
        options: UnitOptions,
        specs: Sequence[DTensorSpec | None] = (),
    ) -> None:
        self.modules, self.slots = list(modules), list(slots)
        self.buffers, self.shared_owners = list(buffers), list(shared_owners)
        self.options, self.precision = options, options.precision
        self.specs = list(specs)
        # By slot, those that stand in the modules now: DTensors, and tensors of `post_all_gather`.
        self.dtensors: dict[int, Tensor] = {}
        self.name = ""  # its module's qualified name in the outermost unit's module
        self.serial = 0  # among the units made over these ranks, in the order of `fully_shard`, equal on all of them
        self.rank_suffix = ""  # of its parameters' names, where other ranks have other parameters of these names
        self.root: UnitContext | None = None  # set when the model first runs
        self.is_shared = False  # another unit shares one of its parameters
        # Of module buffers that the policy has cast, before that; by the number of the module and the name in it.
        self.buffer_dtypes: dict[tuple[int, str], torch.dtype] = {}
        self.hooked: set[tuple[int, int]] = set()  # (buffer, parameter) whose gradients are hooked
        self.registered: list[RegisteredNames] = []
        self.ignored: list[nn.Parameter] = []  # parameters in its modules that are not sharded
        # By slot where the parameters were before, to find others over that memory when the model around it is sharded.
        self.original_memory: list[list[MemoryRange]] = []

        # Set by the user.
        self.reshard_after_forward = options.mesh_info.reshards_after_forward(options.reshard_after_forward)
        self.reshards_entry = options.reshard_after_forward is not None  # also where it is the unit called first
        self.reshard_after_backward = self.synchronizes = True
        self.prefetch: dict[str, list[Unit]] = {}  # by hand, in a "forward" and in a "backward"
        self.kept_unsharded = False  # from `unshard()` to the next pass that runs it, or `reshard()`
        self.in_summon = False  # inside `summon_full_params`
        self.in_conversion = False  # inside `_apply` of its module or of a module around it
        # Full parameters of the units around the one that `apply()` is at, and of that one.
        self.applied_params: dict[FlatBuffer, list[nn.Parameter]] | None = None
        self.state_dict_call: object | None = None  # the `state_dict()` that runs now
        self.loads_local = False  # `load_state_dict` takes this rank's shards now
        self.load_is_compared = False  # all ranks know that the state that is loaded now fits on all of them

        # The pass that runs now.
        self.forward_calls = ForwardCalls()
        self.modules_to_run: set[int] = set()  # ids; if the unit has several modules, the ones not called yet
        self.pending_backwards = 0  # forward calls whose backward has not come yet
        self.use_count = 0  # reasons to be gathered: its own forward or backward, or of units that share
        self.in_backward = False  # between the first gradient at its outputs and the last at its inputs
        self.had_backward = False  # since the last forward pass began
        self.input_grads_seen = False  # a gradient at an input has said that a call's backward is over
        self.has_escaped_tensors = False  # a backward has begun at a tensor that it had not returned
        self.backward_unobserved = False  # it returned nothing through which its backward could be seen to begin
        self.error_at_entry: BaseException | None = None  # the exception being handled when its forward began
        self.ranges: list[record_function] = []  # its forward and backward in the trace of a profiler that records

        self.to_sharded()
        for module in self.modules:
            module.__dict__[UNIT] = self

    def __getstate__(self) -> dict[str, Any]:
        # Numbers of hooks are counted in each process: those that are added later must not be given the same.
        return {name: getattr(self, name) for name in _COPIED} | {"next hook": RemovableHandle.next_id}

    def __setstate__(self, state: dict[str, Any]) -> None:
        Unit.__init__(self, state["modules"], (), state["buffers"], state["shared_owners"], state["options"])
        for name in _COPIED:
            setattr(self, name, state[name])
        if not any(buffer.is_meta for buffer in self.buffers):
            groups = self.options.buffer_groups()
            for buffer in self.buffers:
                buffer.set_groups(groups)
        RemovableHandle.next_id = max(RemovableHandle.next_id, state["next hook"])
        for module in self.modules:
            cast(Any, module)._register_unit()

    @property
    def module(self) -> nn.Module:
        """Its module; of several the first, by which it is named."""
        return self.modules[0]

    @property
    def origin(self) -> str:
        """Says which of all units it is; equal on all its ranks."""
        kind = type(self.module).__name__
        return f"{unit_title(self.name)} ({kind}, number {self.serial} in the order of fully_shard)"

    @property
    def is_restored(self) -> bool:
        """Whether it has its state: a copy, or a unit read from a file, is first made and then filled."""
        return "prefetch" in vars(self)

    @property
    def gathered(self) -> bool:
        """Whether a buffer is gathered, or being gathered."""
        return any(buffer.state is not State.SHARDED for buffer in self.buffers)

    @property
    def is_stale(self) -> bool:
        """Whether an optimizer has stepped, or a shard was written to, since it was gathered; the same on all ranks."""
        # A backward that nothing shows to begin still reads the gathered parameters: a step of another model leaves it
        # there.
        return any(buffer.is_stale(by_writes_alone=self.backward_unobserved) for buffer in self.buffers)

    @property
    def trains(self) -> bool:
        """Whether any of its own parameters wants a gradient."""
        return any(buffer.trains for buffer in self.buffers)

    @property
    def shard_versions(self) -> list[int]:
        """The version counters of the shards that it computes with."""
        return [buffer.version for unit in (self, *self.shared_owners) for buffer in unit.buffers]

    # The parameters in the module tree.

    def to_sharded(self) -> None:
        """Puts the local shards into the module, as everybody sees them outside of its forward and backward."""
        self.dtensors.clear()
        for module, attribute, buffer, number in self.slots:
            shard = flattened_parameter(buffer, number) if buffer.flatten else buffer.sharded_params[number]
            set_param(module, attribute, shard)

    def to_unsharded(self) -> None:
        """Puts the full parameters into the module, with which it computes."""
        for index, slot in enumerate(self.slots):
            if slot.buffer.has_post_all_gather:
                self.dtensors[index] = slot.buffer.post_all_gather(slot.number)
                set_param(slot.module, slot.attribute, self.dtensors[index])
            else:
                self.set_whole(index, slot.buffer.unsharded_params[slot.number])

    def set_whole(self, place: int, param: nn.Parameter) -> None:
        """Puts a full parameter into one slot, or a DTensor around it."""
        slot, spec = self.slots[place], self.specs[place]
        if spec is not None:
            self.dtensors[place] = spec.wrap(param)
        set_param(slot.module, slot.attribute, param if spec is None else self.dtensors[place])

    def spec_of(self, buffer: int, number: int) -> DTensorSpec | None:
        """How one of its own parameters is made a DTensor."""
        places = zip(self.slots, self.specs, strict=True)
        return next(spec for slot, spec in places if slot.buffer is self.buffers[buffer] and slot.number == number)

    def set_flat_params(self, *, shown: bool = True) -> None:
        """Sets the module's flat parameters, if it has such, or None in their place."""
        for number, buffer in enumerate(self.buffers if self.options.flatten_parameters else ()):
            self.module._parameters[flat_param_name(number)] = buffer.sharded_params[0] if shown else None

    def replaced_slot(self) -> ParamSlot | None:
        """The first slot that holds neither the local shard nor the full parameter of this unit."""
        for index, slot in enumerate(self.slots):
            module, attribute, buffer, number = slot
            current = module._parameters.get(attribute)
            shard = None if buffer.flatten else buffer.sharded_params[number]
            unsharded = self.dtensors.get(index, buffer.unsharded_params[number])
            if current is not shard and current is not unsharded:
                return slot
        return None

    def has_registered_names(self) -> bool:
        """Whether its modules hold the children and parameters that they held when these were last checked."""
        return bool(self.registered) and all(RegisteredNames.of(names.module) == names for names in self.registered)

    # A pass.

    def begin_forward(self) -> None:
        """A forward pass begins, with whichever unit."""
        if self.had_backward and not self.backward_unobserved:
            # Outputs without a backward by now, for example of an evaluation, get none.
            self.pending_backwards = 0
        self.had_backward, self.forward_calls = False, ForwardCalls()
        self.modules_to_run = {id(module) for module in self.modules} if len(self.modules) > 1 else set()

    def await_backward(self, awaits: bool) -> None:
        """Notes for the optimizer whether a forward with gradients has had no backward pass, of whichever units."""
        for buffer in self.buffers:
            buffer.awaits_backward = awaits and buffer.trains

    def end_backward(self) -> None:
        """A backward pass has ended, of whichever units."""
        # The backward of another call may come in a later pass without a sign, so it stays gathered until then.
        self.backward_unobserved = self.backward_unobserved and self.input_grads_seen and self.pending_backwards > 0
        self.had_backward, self.input_grads_seen = True, False
        self.use_count = 0
        self.await_backward(False)

    def discard(self) -> None:
        """After an error: back to the shards; gradients of earlier passes stay."""
        while self.ranges:
            self.close_range()
        for buffer in self.buffers:
            buffer.discard()
        self.pending_backwards = self.use_count = 0
        self.await_backward(False)
        self.in_backward = self.backward_unobserved = self.kept_unsharded = False
        self.to_sharded()

    def on_buffers_moved(self) -> None:
        """Its buffers have other parameters to hook, and all ranks have to compare it again."""
        self.hooked.clear()
        self.pending_backwards = 0
        if self.root is not None:
            self.root.stale = True

    # Gather and release.

    def gather(self, *, copies_shard: bool = False) -> None:
        """Starts to gather all buffers that are not gathered yet; see `FlatBuffer.gather`."""
        for number, buffer in enumerate(self.buffers):
            if buffer.state is State.SHARDED:
                with self.range("all_gather") if profiler_runs() else NO_RANGE:
                    self.start("gather", number, copies_shard=copies_shard)

    def wait_gathered(self) -> None:
        """Returns when all buffers can be read."""
        waits = [buffer.wait_gathered for buffer in self.buffers if buffer.state is not State.GATHERED]
        if waits:
            with self.range("wait_all_gather") if profiler_runs() else NO_RANGE:
                self.contract.wait(Event("gather", self.name), *waits)

    def release(self, *, keep_part: bool = False) -> None:
        """Frees the gathered parameters, but for a part of them; waits for a prefetch that is not used."""
        if not self.gathered and (keep_part or not any(buffer.part is not None for buffer in self.buffers)):
            return
        waits = any(buffer.state is State.GATHERING for buffer in self.buffers)
        with self.contract.waiting(Event("gather", self.name)) if waits else nullcontext():
            for buffer in self.buffers:
                buffer.release(self.contract.limit_seconds, keep_part=keep_part)

    # Reduce.

    def trained_buffers(self) -> list[int]:
        """The numbers of the buffers that train."""
        return [number for number, buffer in enumerate(self.buffers) if buffer.trains]

    def reduce(self, trained: Sequence[int]) -> None:
        """Starts to reduce the gradients of all buffers that train."""
        with self.range("reduce_scatter") if profiler_runs() else NO_RANGE:
            for number in trained:
                self.start("reduction", number)

    def wait_reduced(self) -> None:
        """Waits for the reductions, so that their flat gradients are free."""
        with self.range("wait_reduce_scatter") if profiler_runs() else NO_RANGE:
            self.contract.wait(Event("reduction", self.name), *[buffer.wait_reduced for buffer in self.buffers])

    def finish_reductions(self) -> None:
        """Waits for all parts of those reductions that have several."""
        waits = [buffer.finish_reduction for buffer in self.buffers if buffer.transport.traits.reduces_in_halves]
        if waits:
            self.contract.wait(Event("reduction", self.name), *waits)

    def finish_quantized_reductions(self) -> None:
        """Waits for all parts of those reductions that make or read messages after the scatter."""
        for number, buffer in enumerate(self.buffers):
            if buffer.transport.traits.reduces_messages_late:
                self.log_replication(number)
                self.contract.wait(Event("reduction", self.name), buffer.finish_reduction)

    def log_replication(self, number: int) -> None:
        """The second half of an average over replicas begins here: a rank that fails serves it here, too."""
        self.contract.history.log.append(LogEntry(self.transfer("replication", number), is_transfer=True))

    # The trace of a profiler.

    def range(self, what: str) -> record_function:
        """A range in the trace with this unit's name, to be entered while a profiler records."""
        return record_function(f"scale_fsdp::{what} ({self.name or 'root'})")

    def open_range(self, what: str) -> None:
        """Opens a range that another hook ends, by `close_range`."""
        self.ranges.append(self.range(what))
        self.ranges[-1].__enter__()

    def close_range(self) -> None:
        """Ends the range that was opened last."""
        self.ranges.pop().__exit__(None, None, None)

    # One buffer's collective.

    def start(self, phase: str, number: int, *, copies_shard: bool = False) -> None:
        """Starts one buffer's "gather" or "reduction"."""
        transfer, buffer = self.transfer(phase, number), self.buffers[number]
        if phase == "gather":
            buffer.gather(message_tag(transfer), copies_shard=copies_shard)
        else:
            buffer.reduce(message_tag(transfer))
        self.contract.history.log.append(LogEntry(transfer, is_transfer=True))

    def transfer(self, phase: str, number: int) -> Event:
        """One buffer's collective; messages carry a tag of it, so that no rank reads data of another unit."""
        return Event(phase, f"{self.name}#{number}")


class UnitContext:
    """The state that all units of one model share.

    Args:
        units: All of them, in the order of `named_modules`; the module of the first holds all the others.
        abort_message: The text of an aborted step, as for `Contract`.
    """

    def __init__(self, units: Sequence[Unit], abort_message: Callable[[Sequence[str]], str]) -> None:
        self.units = list(units)
        self.outermost = outermost = self.units[0]
        self.by_name = {unit.name: unit for unit in self.units}
        self.buffers = [buffer for unit in self.units for buffer in unit.buffers]
        stops = list(itertools.accumulate(len(unit.buffers) for unit in self.units))
        # The numbers of each unit's buffers among these.
        self.buffer_numbers = {u: range(stop - len(u.buffers), stop) for u, stop in zip(self.units, stops, strict=True)}
        group = max((unit.options.mesh_info.whole for unit in self.units), key=lambda group: group.size)
        self.contract = Contract(group, outermost.options.limit_seconds, abort_message, outermost.origin)
        self.entry_unit: Unit | None = None  # the unit that was called first in the forward pass that runs now
        self.in_backward = False
        self.synchronizes = True  # gradients are reduced at the end of a backward pass; False inside `no_sync`
        self.starting_gathers: list[Unit] = []
        self.failure: BaseException | None = None  # the exception of the current backward pass, if known
        self.shared_error: BaseException | None = None  # this rank's own error, where all ranks know of it
        self.stale = False  # units have moved to another dtype, device or group: a new root takes its place

    def reduces(self, unit: Unit) -> bool:
        """Whether a unit's gradients are reduced at the end of this backward pass."""
        return self.synchronizes and unit.synchronizes

    @property
    def reduces_any(self) -> bool:
        """Whether any unit's are."""
        return self.synchronizes and any(unit.synchronizes for unit in self.units)

    def recover(self) -> None:
        """Ends a backward pass that has failed; see `Root`."""
        raise NotImplementedError


def set_param(module: nn.Module, attribute: str, param: Tensor | FlattenedParameter) -> None:
    """Sets `module.attribute`; a `FlattenedParameter` stands in `__dict__`, and not among the parameters."""
    registered = None if isinstance(param, FlattenedParameter) else param
    vars(module).pop(attribute, None)
    if type(module).__setattr__ is not nn.Module.__setattr__:
        # Some modules, for example nn.LSTM, keep a second list of their weights, which their own __setattr__ maintains.
        setattr(module, attribute, registered)
    else:
        module._parameters[attribute] = cast("nn.Parameter | None", registered)  # A DTensor is the result of one.
    if registered is None:
        # Programs that look for tied parameters take two of None for one, and set both places.
        module._parameters.pop(attribute, None)
        vars(module)[attribute] = param
