"""One stage's part in a model's own forward: what is called here, what stands for itself, and where it ends.

While a stage runs the forward, each call of a unit passes through here. Before the stage begins, units of earlier
stages return absent tensors of the shapes that the trail tells. At the call where it begins, the arguments are those
that the stage before has sent. At the call where the next stage begins, the forward is left: its arguments are sent on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scale_checkpoint.recompute import rng as randomness
from scale_core.tree import map_tensors
from scale_pipe.module_split.collected_outputs import add_collected, collecting
from scale_pipe.module_split.cut_plan import CutPlan
from scale_pipe.module_split.placeholder_tensor import (
    Absent,
    AbsentTensorError,
    absent_in,
    holds_absent,
    received,
    shape_of,
)
from scale_pipe.module_split.stage_io import Arguments, Handed, Local, Opened, Returned, hand_over, open_handed


class SplitError(RuntimeError):
    """A model cannot run in the stages that it is cut into; the message says where to cut, or what to hold."""


class _Reached(Exception):
    """The call at which the next stage begins. Wrappers take what is no `Exception` for an interrupt of the process.

    Attributes:
        call: Its arguments.
    """

    def __init__(self, call: Arguments) -> None:
        super().__init__("this stage ends here")
        self.call = call


class Replay:
    """A run of the model's forward on one stage.

    Args:
        plan: Which stage holds what.
        stage: Which one runs.
        device: Its device.
        handed: What the stage before has returned; None on the first.
        inputs: Of the model, as the first stage is given them; later ones find them in what was handed over.
        passed: The same as the next stage is to get them; what it need not have is absent.
        own: Inputs of the model by keyword that this stage alone is given.
    """

    def __init__(
        self,
        plan: CutPlan,
        stage: int,
        device: torch.device,
        *,
        handed: Handed | None = None,
        inputs: Arguments = ((), {}),
        passed: Arguments = ((), {}),
        own: Mapping[str, Any] | None = None,
    ) -> None:
        self._plan, self._stage, self._device = plan, stage, device
        self._begin = plan.cuts[stage - 1] if stage else None
        self._end = plan.cuts[stage] if stage < len(plan.cuts) else None
        self._opened = open_handed(handed, device) if handed is not None else Opened(inputs, ((), {}), (), ())
        self._trail, self._collected = list(self._opened.trail), list(self._opened.collected)
        self._replayed = 0
        self._begun = stage == 0
        self._own = dict(own or {})
        self._passed = passed if handed is None else self._opened.inputs

    def run(self, forward: Any) -> Any:
        """Runs the forward of the model's frame; returns what the next stage needs, or the model's output.

        Args:
            forward: Takes the model's inputs.

        Raises:
            SplitError: The forward does not pass the cuts as the plan has it.
            AbsentTensorError: A value of another stage is needed that was not handed over.
        """
        args, kwargs = self._opened.inputs
        self._states = [] if self._begun else randomness.states()
        try:
            with _running(self):
                output = forward(*args, **{**kwargs, **self._own})
        except _Reached as end:
            return hand_over(self._passed, end.call, tuple(self._trail), self._collected)
        if not self._begun:
            raise SplitError(
                f"the forward is over, but {self._begin!r}, where stage {self._stage} begins, was not called"
            )
        if self._end is not None:
            raise SplitError(
                f"the forward is over, but {self._end!r}, where stage {self._stage + 1} begins, was not called; cut at "
                "modules that every forward calls"
            )
        output = received(output)
        if (lacking := absent_in(output)) is not None:
            raise AbsentTensorError(
                f"the model's output has a tensor {list(lacking.shape)} from {lacking.origin}, which is not on stage "
                f"{self._stage}; leave it out of the output, hand it to {self._begin!r} as an argument, or have what "
                f"makes it here as well: split(..., hold={{...: {self._stage}}})"
            )
        return output

    def watches(self, name: str) -> bool:
        """Whether the calls of a module are to pass here: of all but frames in which nothing begins or ends.

        Args:
            name: Its name in the model.
        """
        return name not in self._plan.frames or name in (self._begin, self._end)

    def call(
        self, name: str, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module of a frame, or does what is due in its place.

        Args:
            name: Its name in the model.
            module: What stands in the frame.
            function: What the caller wants to call: the module, or its forward.
            args: By position.
            kwargs: By keyword.

        Raises:
            SplitError: It is on another stage.
            AbsentTensorError: An argument is on another stage.
        """
        if holds_absent((args, kwargs)):
            args, kwargs = received((args, kwargs))
        if name == self._end:
            self._check_begun(name)
            self._check_there(name, args, kwargs)
            raise _Reached((args, kwargs))
        begins = name == self._begin and not self._begun
        if begins:
            args, kwargs = self._begin_with((args, kwargs))
        if name in self._plan.frames:  # The next cut is inside of the module where this stage begins.
            return function(*args, **kwargs)
        if name not in self._plan.stages:
            return self._call_free(name, module, function, args, kwargs)
        if not self._plan.holds(self._stage, name) or (not self._begun and self._is_replayed(name)):
            return self._stand_in(name)
        self._check_begun(name)
        self._check_there(name, args, kwargs)
        with _running(None), collecting() as added:
            output = function(*args, **kwargs)
        if self._end is not None:
            self._trail.append(Returned(name, map_tensors(shape_of, output)))
            self._collected.append(added)
        return output

    def _is_replayed(self, name: str) -> bool:
        """Whether the next call of the trail is this one: a module that several stages hold was called before."""
        return self._replayed < len(self._opened.trail) and self._opened.trail[self._replayed].name == name

    def _stand_in(self, name: str) -> Any:
        """Returns, in the place of a module's output, absent tensors of its shapes."""
        where, here = self._plan.where(name), f"stage {self._stage}"
        if not self._is_replayed(name) or self._begun:
            earlier = self._plan.stages[name][0] < self._stage
            if self._end is not None and name.startswith(f"{self._end}."):
                raise SplitError(f"{self._end!r} is not called itself, but its part {name!r} is: cut at {name!r}")
            if self._begun or not earlier:
                also = sorted({*self._plan.stages[name], self._stage}) if earlier else self._stage
                raise SplitError(
                    f"the forward calls {name!r} on {here}, but by the order of registration it is on {where}; write "
                    f'split(..., hold={{"{name}": {also}}}), or cut elsewhere'
                )
            expected = self._opened.trail[self._replayed :][:1]
            raise SplitError(
                f"the forward calls {name!r} on {here}, where on the stage before it called "
                f"{expected[0].name if expected else self._begin!r}: it is to take the same way on every stage"
            )
        shapes = self._opened.trail[self._replayed].shapes
        add_collected(self._opened.collected[self._replayed])
        self._replayed += 1
        return map_tensors(lambda shape: Absent(shape, f"module {name!r} of {where}", self._device), shapes)

    def _call_free(
        self, name: str, module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Calls a module that holds nothing; on a stage that has not begun, without a trace on random numbers."""
        if self._begun or not module.training:
            return function(*args, **kwargs)
        states = randomness.states()
        output = function(*args, **kwargs)
        drawn = randomness.drawn_since(states)
        if not drawn:
            return output
        for generator, state in drawn:
            generator.set_state(state)
        origin = f"module {name!r}, which draws random numbers on an earlier stage"
        return map_tensors(lambda tensor: Absent(shape_of(tensor), origin, self._device), output)

    def _begin_with(self, local: Arguments) -> Arguments:
        """Returns the arguments that the stage before has sent; what stood for them here is resolved."""
        if self._replayed < len(self._opened.trail):
            raise SplitError(
                f"the forward calls {self._begin!r} on stage {self._stage} before it has called "
                f"{self._opened.trail[self._replayed].name!r}, as it did on the stage before: it is to take the "
                "same way on every stage"
            )
        if drawn := randomness.drawn_since(self._states):
            for generator, state in drawn:
                generator.set_state(state)
            raise SplitError(
                f"the forward draws random numbers before {self._begin!r} outside of any module, so stage "
                f"{self._stage} would draw others than stage 0; draw them in a module (nn.Dropout), or outside of "
                "the model"
            )
        self._begun = True
        sent, sent_spec = pytree.tree_flatten(self._opened.call)
        here, here_spec = pytree.tree_flatten(local)
        alike = sent_spec == here_spec
        for place, leaf in enumerate(sent):
            if leaf is Local.VALUE:
                if not alike:
                    raise SplitError(
                        f"an argument of {self._begin!r} is no tensor and no plain value, so each stage takes its own, "
                        f"but on stage {self._stage} the call has other arguments than on the stage before"
                    )
                sent[place] = here[place]
            elif alike and isinstance(here[place], Absent) and isinstance(leaf, Tensor):
                here[place].resolved = leaf
        arguments: Arguments = pytree.tree_unflatten(sent, sent_spec)
        return arguments

    def _check_begun(self, name: str) -> None:
        if not self._begun:
            raise SplitError(
                f"the forward calls {name!r} of stage {self._stage} before {self._begin!r}, where that stage begins; "
                f'cut at {name!r}, or write split(..., hold={{"{name}": {self._stage - 1}}})'
            )

    def _check_there(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if holds_absent((args, kwargs)) and (lacking := absent_in((args, kwargs))) is not None:
            raise AbsentTensorError(
                f"{name!r} on stage {self._stage} is called with a tensor {list(lacking.shape)} from {lacking.origin}, "
                f"which went around the cut at {self._begin!r}: hand it to that module as an argument too, cut "
                f"elsewhere, or have what makes it here as well: split(..., hold={{...: {self._stage}}})"
            )


_local = threading.local()


def active_replay() -> Replay | None:
    """Returns the run that this thread is in; None outside, and inside of a unit."""
    return getattr(_local, "replay", None)


@contextmanager
def _running(replay: Replay | None) -> Iterator[None]:
    before = active_replay()
    _local.replay = replay
    try:
        yield
    finally:
        _local.replay = before
