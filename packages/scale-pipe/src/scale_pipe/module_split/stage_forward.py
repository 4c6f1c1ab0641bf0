"""The forward of a stage, and the modules that the model's code finds in it."""

from __future__ import annotations

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
from scale_pipe.module_split.placeholder_tensor import PlaceholderTensor, to_meta
from scale_pipe.module_split.replay import Replay, SplitError, active_replay
from scale_pipe.module_split.stage_io import CallArguments, StageOutput


class StageForward:
    """The forward of a stage, which is copied and pickled with it: the model's own, where it runs its part.

    `pass_on` names the model's arguments that later stages get uncut; None is all.
    """

    def __init__(self, plan: CutPlan, stage: int, pass_on: frozenset[str] | None) -> None:
        self.plan, self.stage, self.pass_on = plan, stage, pass_on
        self._module: weakref.ref[nn.Module] | None = None
        self._first: tuple[nn.Module, str] | None = None  # The first parameter of the stage, which may be replaced.
        self._resolved_parameters: list[PlaceholderTensor] = []  # Until the next call, as recomputation may read them.

    def bind(self, module: nn.Module) -> None:
        """Becomes the forward of a stage."""
        self._module = weakref.ref(module)  # The module holds this: a strong reference would be a cycle.
        vars(module)["forward"] = self

    def __getstate__(self) -> tuple[Any, ...]:
        return self.plan, self.stage, self.pass_on, self._module and self._module()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.plan, self.stage, self.pass_on, module = state
        self._first, self._resolved_parameters = None, []
        self._module = module and weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module() if self._module is not None else None
        if module is None:
            raise ReferenceError("the stage of this forward was deleted: keep the stage, and call it")
        forward = partial(type(module).forward, module)
        if not self.stage:
            inputs = args, kwargs
            passed = inputs if self.pass_on is None else self._passed_inputs(module, inputs)
            return Replay(self.plan, 0, self._device(module, inputs), inputs=inputs, passed_inputs=passed).run(forward)
        if len(args) != 1 or not isinstance(args[0], StageOutput):
            description = ", ".join([*(type(arg).__name__ for arg in args), *kwargs]) or "nothing"
            raise TypeError(
                f"stage {self.stage} takes what stage {self.stage - 1} returns, one StageOutput, and the model's own "
                f"arguments by keyword, but got {description}; other arguments go to stage 0"
            )
        for parameter in self._resolved_parameters:
            parameter.resolved = None
        replay = Replay(self.plan, self.stage, self._device(module, args[0]), received=args[0], own_inputs=kwargs)
        self._resolved_parameters = replay.resolved_parameters
        return replay.run(forward)

    def _device(self, module: nn.Module, given: Any) -> torch.device:
        """Returns the device of the stage's parameters, or else of its buffers, or of its arguments."""
        param = None if self._first is None else self._first[0]._parameters.get(self._first[1])
        if param is None:
            parameters = (
                (part, key) for part in module.modules() for key, p in part._parameters.items() if p is not None
            )
            self._first = next(parameters, None)
            param = None if self._first is None else self._first[0]._parameters[self._first[1]]
        if param is not None:
            return param.device
        tensors: Iterator[Tensor] = chain(module.buffers(), tensors_in(given))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))

    def _passed_inputs(self, module: nn.Module, inputs: CallArguments) -> CallArguments:
        """Returns the model's inputs with placeholders for those that later stages do not get."""
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        args, kwargs = inputs

        def passed(name: str | None, value: Any) -> Any:
            if name in (self.pass_on or ()):
                return value
            origin = f"the input {name!r}"
            return map_tensors(lambda tensor: PlaceholderTensor(to_meta(tensor), origin, tensor.device), value)

        by_position = zip([*names, *[None] * len(args)], args, strict=False)
        return tuple(passed(name, value) for name, value in by_position), {
            name: passed(name, value) for name, value in kwargs.items()
        }


class RemoteForward:
    """The forward of a placeholder module, which runs only where a model calls a part of a held module by itself."""

    def __init__(self, name: str, stages: str) -> None:
        self.name, self.stages = name, stages

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise SplitError(
            f"{self.name!r} is on {self.stages}, and was called here by itself, not through the module that it is part "
            f'of; cut at {self.name!r} or write split(..., hold={{"{self.name}": ...}}), so that it counts by itself'
        )


class StageModules(dict[str, nn.Module | None]):
    """The `_modules` of a split module. While its stage runs, it returns modules whose calls pass the replay.

    `prefix` is the prefix of their names in the model: "" or "transformer.h.".
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def __getitem__(self, key: str) -> nn.Module | None:
        return self._intercepted(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        return self._intercepted(key, super().get(key, default))

    def values(self) -> Any:
        return [self[key] for key in self] if active_replay() is not None else super().values()

    def items(self) -> Any:
        return [(key, self[key]) for key in self] if active_replay() is not None else super().items()

    def _intercepted(self, key: str, module: nn.Module | None) -> nn.Module | None:
        replay = active_replay()
        if replay is None or module is None or not replay.intercepts(self.prefix + key):
            return module
        return _InterceptedModule(self.prefix + key, module)


class _InterceptedModule(nn.Module):
    """A module as the forward of a stage finds it: the module itself, but for its call."""

    def __init__(self, name: str, module: nn.Module) -> None:
        object.__setattr__(self, "_intercepted", (name, module))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name, module = object.__getattribute__(self, "_intercepted")
        replay = active_replay()
        if replay is None:  # A reference that has outlived the forward.
            return module(*args, **kwargs)
        return replay.call(name, module, module, args, kwargs)

    def __getattribute__(self, key: str) -> Any:
        name, module = object.__getattribute__(self, "_intercepted")
        replay = active_replay() if key == "forward" else None
        if replay is not None:  # Some call the forward itself, past the hooks.
            return lambda *args, **kwargs: replay.call(name, module, module.forward, args, kwargs)
        return getattr(module, key)

    def __setattr__(self, key: str, value: Any) -> None:
        setattr(_module_of(self), key, value)

    def __getitem__(self, key: Any) -> Any:
        return _module_of(self)[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(_module_of(self))

    def __len__(self) -> int:
        return len(_module_of(self))

    def __bool__(self) -> bool:
        return bool(_module_of(self))

    def __repr__(self) -> str:
        return repr(_module_of(self))


def _module_of(intercepted: _InterceptedModule) -> Any:
    return object.__getattribute__(intercepted, "_intercepted")[1]
