"""A stage's copy of a model's frame: what its forward is, and what it finds where it looks for modules."""

from __future__ import annotations

import difflib
import inspect
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from scale_core.tree import map_tensors, tensors_in
from scale_pipe.module_split.cut_plan import CutPlan
from scale_pipe.module_split.placeholder_tensor import Absent, shape_of
from scale_pipe.module_split.replay import Replay, SplitError, active_replay
from scale_pipe.module_split.stage_io import Arguments, Handed


class StageForward:
    """The forward of a stage: the model's own, of which it runs its part. It is copied and pickled with the stage.

    Args:
        plan: Which stage holds what.
        stage: Which one this is.
        pass_on: The names of the model's arguments that later stages get whole; None for all.
    """

    def __init__(self, plan: CutPlan, stage: int, pass_on: frozenset[str] | None) -> None:
        self.plan, self.stage, self.pass_on = plan, stage, pass_on
        self._module: weakref.ref[nn.Module] | None = None
        self._first: tuple[nn.Module, str] | None = None

    def bind(self, module: nn.Module) -> None:
        """Becomes the forward of a stage.

        Args:
            module: The model's frame.
        """
        self._module = weakref.ref(module)  # The module holds this; so nothing goes round in a circle.
        vars(module)["forward"] = self

    def check_names(self, model: nn.Module) -> None:
        """Checks that the model's forward takes what is to be passed on.

        Args:
            model: Whose.

        Raises:
            ValueError: It has no argument of a name.
        """
        parameters = inspect.signature(type(model).forward).parameters
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return
        for name in self.pass_on or ():
            if name not in parameters:
                near = difflib.get_close_matches(name, parameters, n=3) or list(parameters)[1:]
                raise ValueError(f"pass_on names {name!r}, but the forward of {type(model).__name__} takes {near}")

    def __getstate__(self) -> tuple[Any, ...]:
        return self.plan, self.stage, self.pass_on, self._module and self._module()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.plan, self.stage, self.pass_on, module = state
        self._first = None
        self._module = module and weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module() if self._module is not None else None
        if module is None:
            raise ReferenceError("this forward is that of a stage that is gone: keep the stage, and call it")
        forward = partial(type(module).forward, module)
        if not self.stage:
            inputs = args, kwargs
            passed = inputs if self.pass_on is None else self._passed(module, inputs)
            return Replay(self.plan, 0, self._device(module, inputs), inputs=inputs, passed=passed).run(forward)
        if len(args) != 1 or not isinstance(args[0], Handed):
            given = ", ".join([*(type(arg).__name__ for arg in args), *kwargs]) or "nothing"
            raise TypeError(
                f"stage {self.stage} takes what stage {self.stage - 1} returns, one Handed, and the model's own "
                f"arguments by keyword, but got {given}; other arguments go to stage 0"
            )
        device = self._device(module, args[0])
        return Replay(self.plan, self.stage, device, handed=args[0], own=kwargs).run(forward)

    def _device(self, module: nn.Module, given: Any) -> torch.device:
        """Returns where the stage computes: where its parameters are, or else what it is given."""
        found = None if self._first is None else self._first[0]._parameters.get(self._first[1])
        if found is None:
            self._first = next(
                (
                    (part, key)
                    for part in module.modules()
                    for key, tensor in part._parameters.items()
                    if tensor is not None
                ),
                None,
            )
            found = None if self._first is None else self._first[0]._parameters[self._first[1]]
        if found is not None:
            return found.device
        tensors: Iterator[Tensor] = chain(module.buffers(), tensors_in(given))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _passed(self, module: nn.Module, inputs: Arguments) -> Arguments:
        """Returns the inputs as later stages get them."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        args, kwargs = inputs

        def passed(name: str | None, value: Any) -> Any:
            if name in (self.pass_on or ()):
                return value
            return map_tensors(lambda tensor: Absent(shape_of(tensor), f"the input {name!r}", tensor.device), value)

        by_position = zip([*names, *[None] * len(args)], args, strict=False)
        return tuple(passed(name, value) for name, value in by_position), {
            name: passed(name, value) for name, value in kwargs.items()
        }


class Elsewhere:
    """The forward of a placeholder, which is called only where a model calls a part of a unit past it.

    Args:
        name: Of the module.
        where: The stages that it is on.
    """

    def __init__(self, name: str, where: str) -> None:
        self.name, self.where = name, where

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SplitError(
            f"{self.name!r} is on {self.where}, and was called here by itself, not through the module that it is part "
            f'of; cut at {self.name!r} or write split(..., hold={{"{self.name}": ...}}), so that it counts by itself'
        )


class Parts(dict[str, nn.Module | None]):
    """The modules of a frame. While its stage runs, whoever looks for one finds one whose calls pass the replay.

    Args:
        prefix: Of their names in the model: "" or "transformer.h.".
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def __getitem__(self, key: str) -> nn.Module | None:
        return self._seen(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._seen(key, super().get(key, default))

    def values(self) -> Any:
        return [self[key] for key in self] if active_replay() is not None else super().values()

    def items(self) -> Any:
        return [(key, self[key]) for key in self] if active_replay() is not None else super().items()

    def _seen(self, key: str, module: nn.Module | None) -> nn.Module | None:
        replay = active_replay()
        if replay is None or module is None or not replay.watches(self.prefix + key):
            return module
        return _Called(self.prefix + key, module)


class _Called(nn.Module):
    """A module of a frame as the forward sees it: the module itself, but for its call.

    Args:
        name: Of the module in the model.
        module: Which.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        object.__setattr__(self, "_seen", (name, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, module = object.__getattribute__(self, "_seen")
        replay = active_replay()
        if replay is None:  # Kept by someone for longer than the forward.
            return module(*args, **kwargs)
        return replay.call(name, module, module, args, kwargs)

    def __getattribute__(self, key: str) -> Any:
        name, module = object.__getattribute__(self, "_seen")
        replay = active_replay() if key == "forward" else None
        if replay is not None:  # Some call the forward itself, past the hooks.
            return lambda *args, **kwargs: replay.call(name, module, module.forward, args, kwargs)
        return getattr(module, key)

    def __setattr__(self, key: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_seen")[1], key, value)

    def __getitem__(self, key: Any) -> Any:
        return object.__getattribute__(self, "_seen")[1][key]

    def __iter__(self) -> Iterator[Any]:
        return iter(object.__getattribute__(self, "_seen")[1])

    def __len__(self) -> int:
        return len(object.__getattribute__(self, "_seen")[1])

    def __bool__(self) -> bool:
        return bool(object.__getattribute__(self, "_seen")[1])

    def __repr__(self) -> str:
        return repr(object.__getattribute__(self, "_seen")[1])
