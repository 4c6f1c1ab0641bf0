"""One run of a stage: the model's own forward, where it runs its part.

Each call of a module that `StageModules` holds passes through `Replay.call`. Before the stage begins, modules of
earlier stages return placeholders of the shapes in the trail. At the call where the stage begins, the arguments are
those that the stage before has sent. At the call where the next stage begins, the forward ends: its arguments are sent.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from scale_core.device import rng
from scale_core.errors import ScaleError
from scale_core.tree import map_tensors, tensors_in
from scale_pipe.module_split.collected_outputs import add_collected, collecting
from scale_pipe.module_split.cut_plan import CutPlan
from scale_pipe.module_split.placeholder_tensor import (
    PlaceholderTensor,
    PlaceholderTensorError,
    has_placeholder,
    resolve,
    to_meta,
    unresolved_placeholder,
)
from scale_pipe.module_split.stage_io import (
    CallArguments,
    NotForwarded,
    StageInput,
    StageOutput,
    pack_module_output,
    pack_stage_output,
    unpack_module_output,
    unpack_stage_input,
)


class SplitError(ScaleError):
    """A model cannot run in the stages that it is cut into; the message says where to cut, or which module to hold.

    See also: [what to do about a SplitError](../guides/troubleshooting.md#spliterror).
    """


class _StageBoundary(Exception):
    """Raised at the call where the next stage begins. Wrappers of modules would take a `BaseException` for Ctrl-C."""

    def __init__(self, call: CallArguments) -> None:
        super().__init__("this stage ends here")
        self.call = call


class Replay:
    """A run of the model's forward on one stage.

    The first stage is given `inputs`, the model's, and `passed_inputs`, the same with placeholders for those that later
    stages do not get. Others are given `received`, the output of the stage before, and perhaps inputs of the model that
    they alone get, `own_inputs`.
    """

    def __init__(
        self,
        plan: CutPlan,
        stage: int,
        device: torch.device,
        *,
        received: StageOutput | None = None,
        inputs: CallArguments = ((), {}),
        passed_inputs: CallArguments = ((), {}),
        own_inputs: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan, self._stage, self._device = plan, stage, device
        self._begin = plan.cuts[stage - 1] if stage else None
        self._end = plan.cuts[stage] if stage < len(plan.cuts) else None
        self._input = StageInput(inputs, ((), {}), (), ()) if received is None else unpack_stage_input(received, device)
        self._passed_inputs = passed_inputs if received is None else self._input.inputs
        self._own_inputs = dict(own_inputs or {})
        self._trail, self._collected = list(self._input.trail), list(self._input.collected)
        self._num_replayed = 0  # Calls of the received trail.
        self.resolved_parameters: list[PlaceholderTensor] = []  # Of other stages, which were arguments at the cut.
        self._begun = stage == 0

    def run(self, forward: Any) -> Any:
        """Runs the model's forward; returns the `StageOutput`, or the model's output on the last stage."""
        args, kwargs = self._input.inputs
        self._states = [] if self._begun else rng.generator_states()
        try:
            with _running(self):
                output = forward(*args, **{**kwargs, **self._own_inputs})
        except _StageBoundary as boundary:
            return pack_stage_output(self._passed_inputs, boundary.call, tuple(self._trail), self._collected)
        missed = self._end if self._begun else self._begin
        if missed is not None:
            raise SplitError(
                f"the forward is over, but {missed!r}, where stage {self._stage + self._begun} begins, was not called; "
                "cut at modules that every forward calls"
            )
        output = resolve(output)
        if (missing := unresolved_placeholder(output)) is not None:
            raise PlaceholderTensorError(
                f"the model's output has a tensor {list(missing.shape)} from {missing.origin}, which is not on stage "
                f"{self._stage}; leave it out of the output, hand it to {self._begin!r} as an argument, or have what "
                f"makes it here as well: split(..., hold={{...: {self._stage}}})"
            )
        return output

    def intercepts(self, name: str) -> bool:
        """Whether calls of a module pass here: all but calls of split modules in which nothing begins or ends."""
        return name not in self._plan.split_modules or name in (self._begin, self._end)

    def call(
        self, name: str, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls `function`, a module or its forward, or replays its output, or begins or ends the stage there."""
        if has_placeholder((args, kwargs)):
            args, kwargs = resolve((args, kwargs))
        if name == self._end:
            self._check_can_run(name, args, kwargs)
            raise _StageBoundary((args, kwargs))
        if name == self._begin and not self._begun:
            args, kwargs = self._begin_with((args, kwargs))
        if name in self._plan.split_modules:  # The next cut is inside of the module where this stage begins.
            return function(*args, **kwargs)
        if name not in self._plan.stages_of:
            return self._call_stateless(name, module, function, args, kwargs)
        if not self._plan.holds(self._stage, name) or (not self._begun and self._is_replayed(name)):
            return self._replay_output(name)
        self._check_can_run(name, args, kwargs)
        with _running(None), collecting() as added:
            output = function(*args, **kwargs)
        if self._end is not None:
            self._trail.append(pack_module_output(name, output))
            self._collected.append(added)
        return output

    def _is_replayed(self, name: str) -> bool:
        """Whether the next call of the trail is this one: a module that several stages hold was called before."""
        return self._num_replayed < len(self._input.trail) and self._input.trail[self._num_replayed].name == name

    def _replay_output(self, name: str) -> Any:
        """Returns placeholders for the output of a module that an earlier stage has called."""
        where = self._plan.describe_stages(name)
        if self._begun or not self._is_replayed(name):
            raise SplitError(self._not_replayed_reason(name, where))
        packed = self._input.trail[self._num_replayed]
        add_collected(self._input.collected[self._num_replayed])
        self._num_replayed += 1
        return unpack_module_output(packed, where, self._device)

    def _not_replayed_reason(self, name: str, where: str) -> str:
        earlier = self._plan.stages_of[name][0] < self._stage
        if self._end is not None and name.startswith(f"{self._end}."):
            return f"{self._end!r} is not called itself, but its part {name!r} is: cut at {name!r}"
        if self._begun or not earlier:
            also = sorted({*self._plan.stages_of[name], self._stage}) if earlier else self._stage
            return (
                f"the forward calls {name!r} on stage {self._stage}, but by the order of registration it is on "
                f'{where}; write split(..., hold={{"{name}": {also}}}), or cut elsewhere'
            )
        trail = self._input.trail
        expected = trail[self._num_replayed].name if self._num_replayed < len(trail) else self._begin
        return (
            f"the forward calls {name!r} on stage {self._stage}, where on the stage before it called {expected!r}: it "
            "must call the same modules in the same order on every stage"
        )

    def _call_stateless(
        self, name: str, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module that holds nothing; before the stage begins, without an effect on random states."""
        if self._begun or not module.training:
            return function(*args, **kwargs)
        states = rng.generator_states()
        output = function(*args, **kwargs)
        drawn = rng.drawn_since(states)
        if not drawn:
            return output
        rng.set_states(drawn)
        origin = f"module {name!r}, which draws random numbers on an earlier stage"
        return map_tensors(lambda tensor: PlaceholderTensor(to_meta(tensor), origin, self._device), output)

    def _begin_with(self, local: CallArguments) -> CallArguments:
        """Returns the arguments that the stage before has sent, and resolves the placeholders among the local ones."""
        if self._num_replayed < len(self._input.trail):
            raise SplitError(
                f"the forward calls {self._begin!r} on stage {self._stage} before it has called "
                f"{self._input.trail[self._num_replayed].name!r}, as it did on the stage before: it must call the same "
                "modules in the same order on every stage"
            )
        if drawn := rng.drawn_since(self._states):
            rng.set_states(drawn)
            raise SplitError(
                f"the forward draws random numbers before {self._begin!r} outside of any module, so stage "
                f"{self._stage} would draw others than stage 0; draw them in a module (nn.Dropout), or outside of "
                "the model"
            )
        self._begun = True
        sent, sent_spec = pytree.tree_flatten(self._input.call)
        local_leaves, here_spec = pytree.tree_flatten(local)
        same_structure = sent_spec == here_spec
        for index, leaf in enumerate(sent):
            if leaf is NotForwarded.VALUE:
                if not same_structure:
                    raise SplitError(
                        f"the call of {self._begin!r} has different arguments on stage {self._stage} than on the stage "
                        "before, and one of them is neither a tensor nor a plain value, so it can't be sent: give the "
                        "module the same arguments on every stage"
                    )
                sent[index] = local_leaves[index]
            elif same_structure:
                self._resolve_with(local_leaves[index], leaf)
        arguments: CallArguments = pytree.tree_unflatten(sent, sent_spec)
        return arguments

    def _resolve_with(self, local: Any, received: Any) -> None:
        """Gives the placeholders of an argument, or of a container that is not a pytree, the received values."""
        placeholders, tensors = list(tensors_in(local)), list(tensors_in(received))
        if len(placeholders) != len(tensors):
            return  # Whoever uses one of them raises.
        for placeholder, tensor in zip(placeholders, tensors, strict=True):
            if isinstance(placeholder, PlaceholderTensor):
                placeholder.resolved = tensor
                if placeholder.is_parameter:
                    self.resolved_parameters.append(placeholder)

    def _check_can_run(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._begun:
            raise SplitError(
                f"the forward calls {name!r} of stage {self._stage} before {self._begin!r}, where that stage begins; "
                f'cut at {name!r}, or write split(..., hold={{"{name}": {self._stage - 1}}})'
            )
        if has_placeholder((args, kwargs)) and (missing := unresolved_placeholder((args, kwargs))) is not None:
            raise PlaceholderTensorError(
                f"{name!r} on stage {self._stage} is called with a tensor {list(missing.shape)} from {missing.origin}, "
                f"which went around the cut at {self._begin!r}: hand it to that module as an argument too, cut "
                f"elsewhere, or have what makes it here as well: split(..., hold={{...: {self._stage}}})"
            )


_local = threading.local()


def active_replay() -> Replay | None:
    """Returns the run of this thread; None outside of runs, and inside of modules that are on the stage in full."""
    return getattr(_local, "replay", None)


@contextmanager
def _running(replay: Replay | None) -> Iterator[None]:
    before = active_replay()
    _local.replay = replay
    try:
        yield
    finally:
        _local.replay = before
