"""Methods and attributes that the inner optimizer has of its own, for example `train()` and `eval()` of ScheduleFree.

A loop that asks `hasattr(optimizer, "train")` gets the answer of the inner optimizer. Its methods see this rank's part
of the parameters only, so a call is right in two cases: the method looks at one tensor at a time, as the step does, or
one rank has all tensors. Other calls are errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch.optim import Optimizer

PER_TENSOR = frozenset({"train", "eval"})
"""Methods that exchange the values of each parameter with values of its own state, by their names in the field."""

_NUMBERS = (bool, int, float, complex, str, type(None))


def is_number(value: object) -> bool:
    """Whether an attribute says nothing of tensors."""
    return isinstance(value, _NUMBERS) or (isinstance(value, tuple) and all(map(is_number, value)))


def inner_attribute(optimizer: Any, inner: Optimizer | None, name: str, call: Callable[..., Any]) -> Any:
    """Returns an attribute of `inner` that `optimizer` has not: a number, or a method, which becomes `call(name, ...)`.

    Raises:
        AttributeError: There is none, or it is something else.
    """
    if inner is None or name.startswith("_") or not hasattr(inner, name):
        raise AttributeError(f"{type(optimizer).__name__!r} object has no attribute {name!r}")
    value = getattr(inner, name)
    if inspect.ismethod(value) or inspect.isfunction(value):

        def method(*args: Any, **kwargs: Any) -> Any:
            return call(name, *args, **kwargs)

        method.__name__, method.__doc__ = name, value.__doc__
        return method
    if is_number(value):
        return value
    raise AttributeError(
        f"{type(optimizer).__name__}.{name}: {type(inner).__name__} has a {type(value).__name__} of this name, made "
        f"from this rank's part of the parameters. For that part, read optimizer.optim.{name}"
    )


def check_call(name: str, inner: Optimizer, arguments: Iterable[Any], *, together: bool, reassembles: bool) -> None:
    """Raises RuntimeError for a method that would compute with parts of tensors, or of the model."""
    kind = type(inner).__name__
    if not together and name not in PER_TENSOR:
        raise RuntimeError(
            f"OSS: {kind}.{name}() is not supported, because it would see this rank's part of the parameters only. If "
            "it looks at all tensors, as the norm of SAM does, let one rank update all of them: "
            f"OSS(model.parameters(), {kind}, options=OSSOptions(together=True), ...). If this rank's part is meant, "
            f"call optimizer.optim.{name}(...)"
        )
    if reassembles:
        raise RuntimeError(
            f"OSS: {kind}.{name}() is not supported over shards of a model, because {kind} gets their full tensors for "
            f"the step only. If it updates each element by itself, build OSS(model.parameters(), {kind}, "
            "options=OSSOptions(elementwise=True), ...), which works on the shards"
        )
    if together and any(map(callable, arguments)):
        raise RuntimeError(
            f"OSS: {kind}.{name}() is not supported with a closure, because one rank alone would call it, and wait for "
            "the others in its backward pass. Call the closure on all ranks first"
        )
