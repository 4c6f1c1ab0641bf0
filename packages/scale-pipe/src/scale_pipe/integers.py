"""Integers as users give them: NumPy's and tensors of one element count as integers, booleans do not."""

from __future__ import annotations

import operator
from typing import SupportsIndex


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
