"""Integers as users give them: those of NumPy and tensors of one element are some, too, and booleans are none."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import SupportsIndex


def plain_integer(number: object) -> int | None:
    """Returns an integer of any library, as NumPy's, as one of Python's; None for what is none, as booleans are.

    Args:
        number: As a user gives it.
    """
    if isinstance(number, bool) or not isinstance(number, SupportsIndex):
        return None
    try:
        return operator.index(number)
    except TypeError:  # A tensor of several elements, or of floats.
        return None


def check_positive(**numbers: SupportsIndex) -> tuple[int, ...]:
    """Returns positive integers of any library as Python's, in the order in which they are given.

    Args:
        numbers: By the name that the caller knows them by.

    Raises:
        TypeError: One is no integer.
        ValueError: One is less than 1.
    """
    given: Mapping[str, object] = numbers
    plain = []
    for name, number in given.items():
        integer = plain_integer(number)
        if integer is None:
            raise TypeError(f"{name} must be an integer, but is {number!r}")
        if integer < 1:
            raise ValueError(f"{name} must be at least 1, but is {integer}")
        plain.append(integer)
    return tuple(plain)
