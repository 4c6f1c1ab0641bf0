"""Wrong arguments raise at the call, by the annotations of the function or class.

A type checker tells of them before; without one, `"false"` is true, the letters of a text are names, and what is no
module fails ten calls further down. `checked_arguments` compares each argument with its annotation, and refuses what
can't be meant. Whatever acts like what is asked for is taken: integers of NumPy and of torch, whole floats (5e9), lists
and generators for sequences, tensors in tracing, mocks, and all values that an annotation does not restrict, for
example `Any`. What a value may be beyond its type (positive, divides the ranks) is checked where it has its meaning.
"""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])

_BOOLS = {"bool", "bool_", "SymBool"}  # Python's, NumPy's in its versions, and torch's while it traces.


@typing.overload
def checked_arguments(function: F, /) -> F: ...


@typing.overload
def checked_arguments(*, own: str) -> Callable[[F], F]: ...


def checked_arguments(function: Any = None, *, own: str = "") -> Any:
    """Makes a function, or a class when it is constructed, refuse arguments that their annotations rule out.

    The signature stays unchanged. Annotations are read at the first call. If one can't be read, for example a name that
    is imported for type checkers only, its argument is not checked. Nothing is checked while torch.compile traces.
    `own` names parameters that the function compares itself, as it has more to say of them.

    >>> @checked_arguments
    ... def average(values: list[float], weighted: bool = False) -> float:
    ...     return sum(values) / len(values)
    >>> average([1, 2], weighted="no")
    Traceback (most recent call last):
    TypeError: average: expected weighted to be a bool, got 'no' (str); write weighted=False

    Raises:
        TypeError: An argument has a different type.
        ValueError: A device that torch does not know.
    """
    if function is None:
        return functools.partial(checked_arguments, own=own)
    if not isinstance(function, type):
        return _checked(function, function.__qualname__.removesuffix(".__init__"), own.split())
    function.__init__ = _checked(function.__init__, function.__qualname__, own.split())  # type: ignore[misc]
    return function


def did_you_mean(wrong: str | Iterable[str], names: Iterable[str], otherwise: str | None = None) -> str:
    """For an error: the names that are most like a wrong one, or like one of several.

    Where none is like it, `otherwise`; by default the first eight of all names.

    >>> did_you_mean("rows", ["element", "row"])
    "did you mean 'row'?"
    >>> did_you_mean("xyz", ["element", "row"])
    "there are 'element', 'row'"
    >>> did_you_mean("xyz", [])
    'there are none'
    """
    every = list(dict.fromkeys(names))
    wrong_names = [wrong] if isinstance(wrong, str) else wrong
    near = dict.fromkeys(
        name for name_given in wrong_names for name in difflib.get_close_matches(name_given, every, n=3, cutoff=0.5)
    )
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    if otherwise is not None:
        return otherwise
    if not every:
        return "there are none"
    return f"there are {', '.join(map(repr, every[:8]))}{' ...' if len(every) > 8 else ''}"


def refuse_inference_mode(call: str) -> None:
    """Raises where tensors that `call` makes could never be trained.

    Raises:
        RuntimeError: It runs under `torch.inference_mode()`.
    """
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{call} was called under torch.inference_mode(). The tensors that it makes there could not be trained. "
            "Call it before, and write the mode around the evaluation only: with torch.inference_mode(): model(batch)"
        )


def _checked(function: Callable[..., Any], title: str, own: Sequence[str]) -> Callable[..., Any]:
    signature = functools.cache(lambda: _Signature.of(function, own))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            names, kinds, _ = signature()
            for name, value in chain(zip(names, args, strict=False), kwargs.items()):
                kind = kinds.get(name)
                if kind is not None and type(value) not in kind.types and not kind.fits(value):
                    signature().refuse(title, name, value)
        return function(*args, **kwargs)

    return call


class _Kind(NamedTuple):
    """The expectation of an annotation: its name without an article, a test of values, and types that pass."""

    name: str
    fits: Callable[[Any], bool]
    types: frozenset[type] = frozenset()


class _Signature(NamedTuple):
    """The parameters that can be given by their place, in order, and the expectation and the default, by name."""

    names: tuple[str, ...]
    kinds: dict[str, _Kind]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any], own: Sequence[str]) -> _Signature:
        namespace = inspect.unwrap(function).__globals__
        parameters = inspect.signature(function).parameters.values()
        placed = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        compared = [
            parameter for parameter in parameters if parameter.kind not in several and parameter.name not in own
        ]
        kinds = {parameter.name: _kind(_read(parameter.annotation, namespace), namespace) for parameter in compared}
        return cls(
            tuple(parameter.name for parameter in parameters if parameter.kind in placed),
            {name: kind for name, kind in kinds.items() if kind is not None},
            {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty},
        )

    def refuse(self, title: str, name: str, value: Any) -> None:
        """Raises the error of an argument that does not fit, unless it is the default itself."""
        if name in self.defaults and value is self.defaults[name]:
            return
        kind = self.kinds[name]
        hint = ""
        if isinstance(value, str) and "bool" in kind.name and value.lower() in ("true", "false", "yes", "no"):
            hint = f"; write {name}={value.lower() in ('true', 'yes')}"
        elif isinstance(value, str) and " of str" in kind.name:
            hint = f"; write [{value!r:.60}]"
        elif isinstance(value, type):
            hint = f"; write {value.__name__}(...) for an object of it"
        elif kind.name.startswith("class"):
            hint = f"; write {type(value).__name__} for the class itself"
        elif isinstance(self.defaults.get(name, ...), bool | int | float | str | None):
            hint = f"; leave {name} out for the default, {self.defaults[name]!r}"
        error = ValueError if isinstance(value, str) and "device" in kind.name else TypeError
        raise error(f"{title}: expected {name} to be {_with_articles(kind.name)}, got {_came(value)}{hint}")


def _with_articles(name: str) -> str:
    words = [
        word if word[0] == "'" or word in ("None", "False") else f"a{'n' if word[0] in 'aeiouAEIO' else ''} {word}"
        for word in name.split("|")
    ]
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _came(value: Any) -> str:
    """The kind of a value; of a container, also the kind of its items."""
    if value is None or isinstance(value, str | bytes | bool | int | float):
        return "None" if value is None else f"{value!r:.60} ({type(value).__name__})"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, list | tuple | set):
        kinds = ", ".join(sorted({type(item).__name__ for item in value}))
        return f"{type(value).__name__} of {kinds}" if kinds else f"an empty {type(value).__name__}"
    return type(value).__name__


# Annotations.


def _read(hint: Any, known: dict[str, Any]) -> Any:
    """An annotation of an object that was written as text; itself, where the name does not exist here."""
    try:
        return eval(getattr(hint, "__forward_arg__", hint), known)
    except Exception:  # It is no text, or has a name for type checkers alone.
        return hint


def _kind(hint: Any, known: dict[str, Any]) -> _Kind | None:
    """The expectation of an annotation; None if it has nothing to compare."""
    if isinstance(hint, TypeVar):
        return None if hint.__bound__ is None else _kind(_read(hint.__bound__, known), known)
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if torch.device in arguments:  # It tells which texts and numbers are right.
            arguments = tuple(argument for argument in arguments if argument not in (str, int))
        return _union([_kind(argument, known) for argument in arguments])
    if origin is typing.Literal:
        sorts = tuple({type(choice) for choice in arguments})  # Which words there are is for the function to say.
        return _Kind("|".join(map(repr, arguments)), lambda value: isinstance(value, sorts), frozenset(sorts))
    if origin is type:  # The function checks which type.
        return _Kind("class", lambda value: isinstance(value, type))
    if (origin or hint) in _SIMPLE:
        return _SIMPLE[origin or hint]
    if not isinstance(origin or hint, type) or hint in (Any, object, inspect.Parameter.empty):
        return None
    return _container(origin or hint, arguments, known)


def _union(kinds: list[_Kind | None]) -> _Kind | None:
    checked = [kind for kind in kinds if kind is not None]
    if len(checked) < len(kinds):
        return None
    always = frozenset[type]().union(*(kind.types for kind in checked))
    return _Kind(
        "|".join(kind.name for kind in checked), lambda value: any(kind.fits(value) for kind in checked), always
    )


def _container(kind: Any, arguments: tuple[Any, ...], known: dict[str, Any]) -> _Kind:
    """A class, or a container of items."""
    if kind is collections.abc.Callable:
        return _Kind("function", callable)
    if getattr(kind, "_is_protocol", False):
        attributes = [name for cls in kind.__mro__ for name in (*vars(cls), *vars(cls).get("__annotations__", ()))]
        names = [name for name in attributes if not name.startswith("_")]
        return _Kind(kind.__name__, lambda value: not isinstance(value, type) and all(hasattr(value, n) for n in names))
    if issubclass(kind, Mapping):
        return _Kind("mapping", lambda value: isinstance(value, Mapping) or _has(value, "keys", "__getitem__"))
    if issubclass(kind, collections.abc.Container | Iterable) and kind.__module__ in ("builtins", "collections.abc"):
        item = _kind(arguments[0], known) if arguments and (kind is not tuple or arguments[1:] == (...,)) else None
        name = "sequence" if issubclass(kind, collections.abc.Sequence) else "collection"
        return _Kind(name + (f" of {item.name.replace('|', ' or ')}" if item else ""), _holds(item))
    name = f"torch.{kind.__name__}" if kind.__module__ == "torch" else kind.__name__
    return _Kind(name, lambda value: isinstance(value, kind), frozenset({kind}))


def _holds(item: _Kind | None) -> Callable[[Any], bool]:
    """Whether a value is a container, and no text; its items are looked at where that does not use them up."""

    def fits(value: Any) -> bool:
        ways = ("__iter__", "__getitem__", "__contains__")
        if isinstance(value, str | bytes) or not any(_has(value, way) for way in ways):
            return False
        return item is None or not isinstance(value, list | tuple | set) or all(map(item.fits, value))

    return fits


def _has(value: Any, *names: str) -> bool:
    return all(hasattr(type(value), name) for name in names)


def _is_tensor(value: Any) -> bool:
    return _has(value, "__torch_function__")  # Its stand-in while torch.fx traces has it as well.


def _is_bool(value: Any) -> bool:
    if type(value).__name__ in _BOOLS or _is_tensor(value):
        return True
    return isinstance(value, SupportsIndex) and not _has(value, "__len__") and operator.index(value) in (0, 1)


def _is_int(value: Any) -> bool:
    if isinstance(value, float):
        return value.is_integer() or math.isinf(value)
    return isinstance(value, SupportsIndex) and not isinstance(value, bool)


def _is_float(value: Any) -> bool:
    return isinstance(value, SupportsFloat | SupportsIndex) and not isinstance(value, bool)


def _is_device(value: Any) -> bool:
    if not isinstance(value, str | int):
        return isinstance(value, torch.device)
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        return False
    return True


_NONE = _Kind("None", lambda value: value is None, frozenset({types.NoneType}))
_SIMPLE: dict[Any, _Kind] = {
    None: _NONE,
    types.NoneType: _NONE,
    bool: _Kind("bool", _is_bool, frozenset({bool})),
    int: _Kind("integer", _is_int, frozenset({int})),
    float: _Kind("number", _is_float, frozenset({int, float})),
    torch.Tensor: _Kind("tensor", _is_tensor, frozenset({torch.Tensor, torch.nn.Parameter})),
    str: _Kind("str", lambda value: isinstance(value, str), frozenset({str})),
    torch.device: _Kind("torch.device or its name", _is_device),
    os.PathLike: _Kind("path", lambda value: isinstance(value, os.PathLike)),
}
