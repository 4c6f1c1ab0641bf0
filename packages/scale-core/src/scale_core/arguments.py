"""Arguments of public functions: one that does not fit its annotation is refused by name, before anything is done.

torch would say it late, in words of its own, or not at all: the text "false" counts as True, and a class in the place
of a module fails at the first attribute that is asked of it. What no annotation says, such as a range of numbers, is
checked where it matters.
"""

from __future__ import annotations

import collections.abc
import inspect
import operator
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, Union

import torch
from torch import Tensor

_CONTAINERS = {
    collections.abc.Sequence,
    collections.abc.Iterable,
    collections.abc.Collection,
    collections.abc.Container,
    list,
    tuple,
    set,
    frozenset,
}
_MAPPINGS = {collections.abc.Mapping, dict}


def check_types(function: Callable[..., object], given: Mapping[str, Any]) -> None:
    """Refuses what does not fit the annotations of a function; its first line is `check_types(function, locals())`.

    What works as well is taken: whole numbers of other libraries, fractions for a number, any iterable for a sequence.
    Annotations that can't be read while a program runs, protocols and type variables without a bound allow anything.

    Args:
        function: Whose annotations.
        given: Values by the names of the parameters; others are left out.

    Raises:
        TypeError: With the parameter's name, what was expected, what came, and what to write.
    """
    for name, (text, annotation) in _annotations(function).items():
        value = given.get(name)
        if name in given and not _fits(value, annotation):
            owner = function.__qualname__.removesuffix(".__init__")
            raise TypeError(
                f"{owner}: expected {name} to be {_told(text, annotation)}, got {_shown(value)}"
                f"{_hint(name, value, annotation)}"
            )


@cache
def _annotations(function: Callable[..., object]) -> dict[str, tuple[str, Any]]:
    """The annotations that can be read, as they are written and as they are."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        text = parameter.annotation
        if not isinstance(text, str) or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        try:
            annotation = eval(text, vars(inspect.getmodule(function)))  # As typing.get_type_hints does for all.
        except (NameError, AttributeError, TypeError):
            continue
        found[parameter.name] = (text, annotation)
    return found


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value may stand where the annotation stands."""
    origin = typing.get_origin(annotation)
    if origin in (Union, types.UnionType):
        return any(_fits(value, each) for each in typing.get_args(annotation))
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in typing.get_args(annotation))
    if origin is type:
        return isinstance(value, type) and _is_below(value, typing.get_args(annotation)[0])
    if origin in _CONTAINERS:
        return _is_container(value, typing.get_args(annotation))
    if origin in _MAPPINGS:
        return hasattr(value, "keys") and hasattr(value, "__getitem__")
    if origin is collections.abc.Callable or annotation is collections.abc.Callable:
        return callable(value)
    if isinstance(annotation, typing.TypeVar):
        return annotation.__bound__ is None or _fits(value, annotation.__bound__)
    if annotation is None:
        return value is None
    if annotation is bool:
        return isinstance(value, bool) or _is_whole(value)
    if annotation is int:
        return _is_whole(value)
    if annotation is float:
        return not isinstance(value, str) and hasattr(value, "__float__")
    if inspect.isclass(annotation) and origin is None and not getattr(annotation, "_is_protocol", False):
        return annotation is object or isinstance(value, annotation)
    return True


def _is_whole(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _is_below(value: type, bound: Any) -> bool:
    return not inspect.isclass(bound) or getattr(bound, "_is_protocol", False) or issubclass(value, bound)


def _is_container(value: Any, elements: tuple[Any, ...]) -> bool:
    """Whether it can be gone through; text only where its elements are any, since one name is often meant."""
    return not isinstance(value, str | bytes) and (hasattr(value, "__iter__") or hasattr(value, "__contains__"))


def _told(text: str, annotation: Any) -> str:
    """An annotation as it is written, but choices and bounds in the place of the names of aliases."""
    if isinstance(annotation, typing.TypeVar):
        annotation = annotation.__bound__
        text = f"{annotation.__module__}.{annotation.__name__}"
    if text.isidentifier() and typing.get_origin(annotation) is Literal:
        return f"one of {', '.join(map(repr, typing.get_args(annotation)))}"
    return text


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if value is None:
        return "None"
    text = repr(value)
    return f"{text} ({type(value).__name__})" if len(text) < 60 else f"a {type(value).__name__}"


def _hint(name: str, value: Any, annotation: Any) -> str:
    """What to write instead, where it is plain."""
    if isinstance(value, type) and any(
        inspect.isclass(kind) and issubclass(value, kind) for kind in _kinds(annotation)
    ):
        return f": build one, {value.__name__}(...)"
    if isinstance(value, str):
        if hasattr(torch, value) and isinstance(getattr(torch, value), torch.dtype):
            return f": write {name}=torch.{value}"
        if value.lower() in ("true", "false") and bool in _kinds(annotation):
            return f": write {name}={value.capitalize()}"
        if value.lstrip("-").isdecimal() and int in _kinds(annotation):
            return f": write {name}={value}"
        if any(typing.get_origin(kind) in _CONTAINERS for kind in _kinds(annotation)):
            return f": write {name}=[{value!r}]"
    return ""


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The members of a union, with the bounds of type variables; of anything else the annotation."""
    if isinstance(annotation, typing.TypeVar):
        annotation = annotation.__bound__
    is_union = typing.get_origin(annotation) in (Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)
