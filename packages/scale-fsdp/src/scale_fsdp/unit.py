"""One unit: a module whose parameters are gathered before it runs, released after, and reduced after its backward.

The methods stand in the order of time: `before_forward`, `after_forward`, `before_backward`, `after_backward`,
`finish`. Below them stands what they are made of. The order among units, what is fetched ahead and what all units of
a model share is in `root.py`; the buffers and their states are in `scale_core.flat`; the messages are in
`scale_core.collectives`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_core.backward import after_backward, after_gradient, before_backward, own_outputs
from scale_core.contract import Contract
from scale_core.events import Event, message_tag, unit_title
from scale_core.flat import FlatBuffer, State
from scale_core.nested import map_tensors
from scale_fsdp.precision import MixedPrecision
from scale_fsdp.root import Root

_UNIT = "_scale_unit"


def unit_of(module: nn.Module) -> Unit | None:
    """Returns the unit that `fully_shard` has made of this very module, or None."""
    unit: Unit | None = module.__dict__.get(_UNIT)
    return unit


def units_in(module: nn.Module) -> list[Unit]:
    """Returns the units of a module and all that it holds, the outermost first."""
    return [unit for child in module.modules() if (unit := unit_of(child)) is not None]


def paths_in(module: nn.Module) -> dict[int, str]:
    """Returns the qualified name of every module in `module`, by its id; that of `module` itself is ""."""
    return {id(child): path for path, child in module.named_modules()}


def flat_name_of(number: int) -> str:
    """Returns the name under which a module holds the flat parameter of one buffer."""
    return f"flat_param_{number}"


class Slot(NamedTuple):
    """A place in the module tree where a parameter stands: `module.attribute`."""

    module: nn.Module
    attribute: str
    buffer: FlatBuffer
    number: int


class Unit:
    """The sharded life of one module.

    Args:
        module: The module; its nested units are not part of this one.
        slots: Every place in it that holds a parameter of this unit, or of a unit that it shares one with.
        buffers: This unit's own parameters, one flat buffer per dtype and kind.
        lenders: The units that own the parameters which this one shares.
        precision: In which dtypes it computes.
        reshard_after_forward: Release between forward and backward.
        limit_seconds: As the outermost unit, the longest wait for another rank; None is the group's own limit.

    Attributes:
        name: Its module's qualified name in the outermost unit.
        root: What it shares with the other units of its model; set when the model first runs.
        calls: Forward calls whose backward has not come yet in this pass.
        uses: Reasons to be gathered right now: its own forward, its own backward, a borrower's.
        in_backward: Between the first gradient at its outputs and the last at its inputs.
        lends: Another unit shares one of its parameters.
        hidden: It has run and returned nothing through which its backward could be seen to come.
        summoned: Inside `summon_full_params`.
    """

    def __init__(
        self,
        module: nn.Module,
        slots: Sequence[Slot],
        buffers: Sequence[FlatBuffer],
        lenders: Sequence[Unit],
        precision: MixedPrecision,
        reshard_after_forward: bool,
        limit_seconds: float | None = None,
    ) -> None:
        self.module = module
        self.slots, self.buffers, self.lenders = list(slots), list(buffers), list(lenders)
        self.precision = precision
        self.reshard_after_forward = reshard_after_forward
        self.limit_seconds = limit_seconds
        self.name = ""
        self.root: Root | None = None
        self.calls = 0
        self.uses = 0
        self.in_backward = False
        self.lends = False
        self.hidden = False
        self.summoned = False
        self._inputs_tell = False  # In this pass an input's gradient has said that a call's backward is over.
        self._error_at_entry: BaseException | None = None
        self._hooked: set[tuple[int, int]] = set()
        self.show_shards()
        module.__dict__[_UNIT] = self

    # The step, in the order of time.

    def before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """The module is about to run: gather, and fetch the next unit ahead."""
        if self.summoned:
            self._check_no_gradients()
            return args, kwargs
        root = self._enter()
        recomputing = root.in_backward
        root.announce("recomputation" if recomputing else "forward", self)
        if not (recomputing and self.in_backward):
            self._open()
        args, kwargs = self._cast_inputs((args, kwargs))
        if torch.is_grad_enabled() and not (recomputing and self.calls):
            (args, kwargs), _ = after_backward((args, kwargs), self.after_backward)
            self.calls += 1
        return args, kwargs

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
        if torch.is_grad_enabled():
            output = own_outputs(output)
            seen = before_backward(output, functools.partial(self.before_backward, self._versions()))
            # Where no output could be found, nobody will say when the backward comes: nothing is released until then.
            self.hidden = self.hidden or (not seen and self.trains)
        self._close(keep=root.keeps_after_forward(self))
        root.left(self)
        return output

    def before_backward(self, versions: Sequence[int]) -> None:
        """A gradient has arrived at the module's outputs: gather, and fetch the unit before it ahead.

        Args:
            versions: Those of the shards when the module ran.
        """
        root = self._the_root
        root.begin_backward()
        self._check_unchanged(versions)
        if not self.in_backward:
            self.in_backward = True
            root.announce("backward", self)
            self._open()

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

    def gather(self) -> None:
        """Starts to gather all buffers that are not gathered yet."""
        for number, buffer in enumerate(self.buffers):
            buffer.gather(self._the_root.tag("gather", self, number))

    def release(self) -> None:
        """Frees what was gathered; waits for what was fetched ahead and is not used."""
        if not self.gathered:
            return
        contract = self._the_root.contract
        with contract.waiting(Event("gather", self.name)):
            for buffer in self.buffers:
                buffer.release(contract.limit_seconds)

    def gather_whole(self, buffer: FlatBuffer) -> list[Tensor]:
        """Returns a buffer's parameters whole, in the dtype that they are trained in; all ranks call it together.

        Raises:
            ScaleDistributedError: A rank did something else.
        """
        if self.root is not None:
            self.root.recover()
        event = Event("whole parameters", self.name)
        contract = self.root.contract if self.root is not None else Contract(buffer.group, self.limit_seconds)
        with contract.waiting(event):
            return buffer.gather_whole(message_tag(event), contract.limit_seconds)

    def reduce(self) -> None:
        """Starts to reduce the gradients of all buffers that train."""
        for number, buffer in enumerate(self.buffers):
            if buffer.trains:
                buffer.reduce(self._the_root.tag("reduction", self, number))

    def pack(self) -> None:
        """Keeps the gradients of this pass for the reduction at the end of a later one."""
        for buffer in self.buffers:
            buffer.pack(accumulate=True)

    def settle(self) -> None:
        """Waits for the reductions; the gradients then stand in the shards' `grad`."""
        root = self._the_root
        with root.contract.waiting(Event("reduction", self.name)):
            for buffer in self.buffers:
                buffer.settle(root.contract.limit_seconds)

    def discard(self) -> None:
        """After an error: back to the shards, whatever was under way; gradients not reduced yet stay."""
        for buffer in self.buffers:
            buffer.discard()
        self.calls = self.uses = 0
        self.in_backward = self.hidden = False
        self.show_shards()

    def drop_gradients(self) -> None:
        """Forgets the gradients that were not reduced yet."""
        for buffer in self.buffers:
            buffer.drop_gradient()

    def follow_trainable(self) -> None:
        """Takes over what the user has frozen or unfrozen, and listens to what trains."""
        for number, buffer in enumerate(self.buffers):
            buffer.follow_trainable()
            self._refuse_hooks(buffer)
            for index, whole in enumerate(buffer.wholes):
                if whole.requires_grad and (number, index) not in self._hooked:
                    self._hooked.add((number, index))
                    after_gradient(whole, self._packer(number, index))

    def show_shards(self) -> None:
        """Puts the local shards into the module: what everybody sees outside of its forward and backward."""
        for module, attribute, buffer, index in self.slots:
            _put(module, attribute, None if buffer.flatten else buffer.exposed[index])

    @property
    def gathered(self) -> bool:
        """Whether a buffer is gathered, or being gathered."""
        return any(buffer.state is not State.SHARDED for buffer in self.buffers)

    @property
    def trains(self) -> bool:
        """Whether any of its own parameters wants a gradient."""
        return any(buffer.trains for buffer in self.buffers)

    @property
    def _recomputed_for_its_backward(self) -> bool:
        return self._the_root.in_backward and self.in_backward

    def _enter(self) -> Root:
        self._error_at_entry = sys.exc_info()[1]
        root = root_of(self)
        root.recover()
        if root.entry is self:
            root.abort(RuntimeError(f"the forward pass of {unit_title(self.name)} before this one was cut off"))
        if root.entry is None and not root.in_backward:
            root.enter(self)
        return root

    @property
    def _the_root(self) -> Root:
        assert self.root is not None, "a unit ran before it had a root"
        return self.root

    def _open(self) -> None:
        """Gathers, waits, and puts the whole parameters into the module."""
        root = self._the_root
        for unit in (*self.lenders, self):
            unit.gather()
            unit.uses += 1
        root.fetch_ahead()
        with root.contract.waiting(Event("gather", self.name)):
            for unit in (*self.lenders, self):
                for buffer in unit.buffers:
                    buffer.wait_gathered(root.contract.limit_seconds)
        self._show_wholes()

    def _close(self, *, keep: bool) -> None:
        """Puts the shards back into the module, and releases what nobody uses any more."""
        self._let_go(lambda unit: keep or self._the_root.keeps_after_forward(unit))
        if not self.uses:
            self.show_shards()

    def _end_backward(self) -> None:
        root = self._the_root
        self.in_backward = False
        self._let_go(root.keeps_after_backward)
        self.show_shards()
        root.reduce(self)

    def _let_go(self, keeps: Callable[[Unit], bool]) -> None:
        for unit in (self, *self.lenders):
            unit.uses = max(0, unit.uses - 1)  # A forward that failed before it was gathered had no use yet.
            if not unit.uses and not keeps(unit):
                unit.release()

    def _check_no_gradients(self) -> None:
        if torch.is_grad_enabled() and self.trains:
            raise RuntimeError(
                f"{unit_title(self.name)} was called with gradients enabled inside summon_full_params, whose tensors "
                "are copies that no optimizer knows: call it under torch.no_grad(), or outside"
            )

    def _refuse_hooks(self, buffer: FlatBuffer) -> None:
        for index, param in enumerate(buffer.exposed):
            if param._backward_hooks or getattr(param, "_post_accumulate_grad_hooks", None):
                raise RuntimeError(
                    f"a hook is registered on the local shard of '{buffer.names[index]}', where no gradient ever "
                    "arrives by itself: see the gradients before they are reduced by scale_core.on_local_grads(...), "
                    "and those after it in param.grad when backward() has returned"
                )

    def _versions(self) -> list[int]:
        return [buffer.shard._version for unit in (self, *self.lenders) for buffer in unit.buffers]

    def _check_unchanged(self, versions: Sequence[int]) -> None:
        """Autograd's own rule: what a forward has used must not change before its backward."""
        if versions != self._versions():
            raise RuntimeError(
                f"the parameters of {unit_title(self.name)} were changed between its forward and its backward, by an "
                "optimizer step, load_state_dict or another in-place operation, so its gradients would be wrong: "
                "call loss.backward() first"
            )

    def _after_failed_forward(self, root: Root, error: BaseException) -> None:
        if self._recomputed_for_its_backward:
            root.recomputed()  # torch ends a recomputation by an error, once it has all that the backward needs.
        else:
            self._close(keep=False)
        if root.entry is self:
            root.abort(error)

    def _packer(self, number: int, index: int) -> Callable[[Tensor], None]:
        def pack(_: Tensor) -> None:
            root = self._the_root
            root.begin_backward()
            if not self.buffers[number].has_gradient:
                root.make_room()
            self.buffers[number].hold(index, accumulate=not root.synchronizes)
            root.unused.note_gradient(self, number, index)

        return pack

    def _cast_inputs(self, inputs: tuple[Any, Any]) -> tuple[Any, Any]:
        dtype = self.precision.param_dtype
        if dtype is None or not self._the_root.casts_inputs_of(self):
            return inputs
        cast: tuple[Any, Any] = _cast(inputs, dtype)
        return cast

    def _show_wholes(self) -> None:
        for module, attribute, buffer, index in self.slots:
            _put(module, attribute, buffer.wholes[index])


def root_of(unit: Unit) -> Root:
    """Returns what a unit shares with the others of its model; one that has no root yet becomes the outermost."""
    if unit.root is None:
        unit.root = Root(unit, units_in(unit.module))
    return unit.root


def show_tensors(unit: Unit, tensors: dict[int, list[nn.Parameter]]) -> None:
    """Puts other tensors into the module: those of each buffer, by the buffer's id."""
    for module, attribute, buffer, index in unit.slots:
        if id(buffer) in tensors:
            _put(module, attribute, tensors[id(buffer)][index])


def _put(module: nn.Module, attribute: str, param: nn.Parameter | None) -> None:
    """Sets `module.attribute`; None takes it away, as in a module whose parameters are shown as one flat tensor."""
    if type(module).__setattr__ is not nn.Module.__setattr__:
        # Modules such as nn.LSTM keep a second list of their weights, which their own __setattr__ maintains.
        setattr(module, attribute, param)
    elif param is None:
        module._parameters.pop(attribute, None)
    else:
        module._parameters[attribute] = param


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return map_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, tree)
