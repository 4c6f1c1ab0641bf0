"""Arguments as users give them, checked without loading more than the standard library.

Of integers, NumPy's and tensors of one element count, booleans do not.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, SupportsIndex, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def checked_arguments(function: F) -> F:
    """`scale_core.arguments.checked_arguments`, loaded at the first call: to import a schedule needs no torch."""
    of_it: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]

    @functools.cache
    def checked() -> Callable[..., Any]:
        from scale_core import arguments

        decorator: Callable[..., Any] = arguments.checked_arguments(of_it)
        return decorator

    @functools.wraps(of_it)
    def call(*args: Any, **kwargs: Any) -> Any:
        return checked()(*args, **kwargs)

    if not isinstance(function, type):
        return call  # type: ignore[return-value]  # It has the wrapped function's signature.
    function.__init__ = call  # type: ignore[misc]
    return function


def plain_integer(number: object) -> int | None:
    """Returns an integer of any library as Python's; None for anything else, booleans included."""
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        return None
    try:
        return operator.index(number)
    except TypeError:  # A tensor of several elements, or of floats.
        return None


def check_positive(**numbers: SupportsIndex) -> tuple[int, ...]:
    """Returns positive integers as Python's. Raises TypeError or ValueError with the name of one that is not."""
    plain = []
    for name, number in numbers.items():
        integer = plain_integer(number)
        if integer is None:
            raise TypeError(f"{name} must be an integer, but is {number!r}")
        if integer < 1:
            raise ValueError(f"{name} must be at least 1, but is {integer}")
        plain.append(integer)
    return tuple(plain)
