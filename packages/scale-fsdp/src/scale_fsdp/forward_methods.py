"""`register_fsdp_forward_method`: methods other than `forward` that compute with a unit's parameters.

A unit is gathered when it is called, and `model.encode(x)` does not call the model. A registered method runs as the
forward does: gathered before, released after, with a backward of its own. Calls of the module while it runs are a
part of it: `generate` gathers its outermost unit once, not for every token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from torch import nn

from scale_core.arguments import checked_arguments
from scale_fsdp.fully_sharded_data_parallel import FullyShardedDataParallel
from scale_fsdp.runtime.step import post_forward, pre_forward
from scale_fsdp.runtime.unit import Unit, unit_of


@checked_arguments
def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes a method of a unit run with the unit's parameters gathered, as its forward does.

        >>> import torch
        >>> from torch import nn
        >>> from scale_fsdp import fully_shard
        >>> class Autoencoder(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.inward, self.outward = nn.Linear(4, 2), nn.Linear(2, 4)
        ...     def encode(self, x):
        ...         return self.inward(x)
        ...     def forward(self, x):
        ...         return self.outward(self.encode(x))
        >>> model = fully_shard(Autoencoder())
        >>> register_fsdp_forward_method(model, "encode")
        >>> model.encode(torch.ones(3, 4)).sum().backward()

    All ranks call the method together, as they do the module. Registered twice, it runs as if registered once.

    Args:
        module: A unit, or the `FullyShardedDataParallel` around one.
        method_name: The method's name.

    Raises:
        ValueError: The module is not a unit; or the name is "forward", which runs gathered anyhow.
        AttributeError: The module has no such method.
        TypeError: The attribute of that name can't be called, or is a generator or a coroutine.

    See also: [the guide to FSDP](../guides/fsdp.md).
    """
    module = module.sharded_module if isinstance(module, FullyShardedDataParallel) else module
    unit = unit_of(module)
    title = type(module).__name__
    if unit is None:
        raise ValueError(
            f"register_fsdp_forward_method: this {title} is not a unit, so there is nothing to gather for it: "
            f"call fully_shard(module) first, then register_fsdp_forward_method(module, {method_name!r})"
        )
    if method_name == "forward":
        raise ValueError(f"the forward of a unit runs gathered when the {title} is called: write module(...)")
    method = getattr(module, method_name, None)
    if method is None:
        raise AttributeError(f"register_fsdp_forward_method: a {title} has no method {method_name!r}")
    if not callable(method):
        raise TypeError(
            f"register_fsdp_forward_method: {method_name!r} of a {title} is a {type(method).__name__}, not a method"
        )
    if inspect.isgeneratorfunction(method) or inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
        raise TypeError(
            f"register_fsdp_forward_method: {method_name!r} of a {title} is a generator or coroutine, so it would run "
            "after its parameters are released: return its results at once, or call it inside summon_full_params()"
        )
    if isinstance(module.__dict__.get(method_name), _UnshardedMethod):
        return
    if _RUNNING not in module.__dict__:
        module.__dict__[_RUNNING] = _track_forward(unit, module)
    object.__setattr__(module, method_name, _UnshardedMethod(module, method_name, unit, module.__dict__[_RUNNING]))


_RUNNING = "_scale_running_methods"


class _RunningMethods:
    """Counts the running forwards and registered methods of one module; calls inside of them skip the unit's hooks."""

    def __init__(self, unit: Unit) -> None:
        self._unit, self._depth = unit, 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return (args, kwargs) if self else pre_forward(self._unit, module, args, kwargs)

    def post_forward(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return output if self else post_forward(self._unit, module, args, kwargs, output)


class _MethodWrapper:
    """Called in place of a method of a unit's module, with which it is copied and pickled."""

    def __init__(self, module: nn.Module, name: str, unit: Unit, running: _RunningMethods) -> None:
        self._module, self._name, self._unit, self._running = module, name, unit, running
        # A method that another library has put into the instance; otherwise it is found in the class.
        self._patched = None if hasattr(type(module), name) and name not in vars(module) else getattr(module, name)
        functools.update_wrapper(cast(Any, self), self._method)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._module, self._name, self._unit, self._running, self._patched

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._module, self._name, self._unit, self._running, self._patched = state
        functools.update_wrapper(cast(Any, self), self._method)

    @property
    def _method(self) -> Callable[..., Any]:
        """The plain method, bound."""
        if self._patched is not None:
            return cast(Callable[..., Any], self._patched)
        method = inspect.getattr_static(type(self._module), self._name)
        return cast(Callable[..., Any], method.__get__(self._module, type(self._module)))


class _TrackedForward(_MethodWrapper):
    """A module's forward, counted while it runs."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._running:
            return self._method(*args, **kwargs)


class _UnshardedMethod(_MethodWrapper):
    """A method that runs with the unit's parameters gathered."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        unit, module = self._unit, self._module
        if self._running:  # Called by the forward, or by another registered method: gathered already.
            return self._method(*args, **kwargs)
        try:
            args, kwargs = pre_forward(unit, module, args, kwargs, method=self._name)
            with self._running:
                output = self._method(*args, **kwargs)
        except BaseException:
            post_forward(unit, module, args, kwargs, None)  # It sees the error, and ends the pass.
            raise
        return post_forward(unit, module, args, kwargs, output)


def _track_forward(unit: Unit, module: nn.Module) -> _RunningMethods:
    """Wraps the forward of a unit's module, and the unit's hooks around it."""
    running = _RunningMethods(unit)
    replaced = 0
    hooks: Any
    for hooks, module_hooks, other in (
        (module._forward_pre_hooks, pre_forward, running.pre_forward),
        (module._forward_hooks, post_forward, running.post_forward),
    ):
        for key, hook in hooks.items():
            if isinstance(hook, functools.partial) and hook.func is module_hooks:
                hooks[key] = other
                replaced += 1
    assert replaced == 2, "a unit has one hook before and one after its module's forward"
    object.__setattr__(module, "forward", _TrackedForward(module, "forward", unit, running))
    return running
