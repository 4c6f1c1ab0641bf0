"""What is alive in this process, by kind: for code that has to find all objects of a kind and is given none of them.

Such as an optimizer's first step, which asks whose parameters it steps on. They are held weakly.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

_by_kind: defaultdict[type[Any], WeakKeyDictionary[Any, None]] = defaultdict(WeakKeyDictionary)


def register_live(kind: type[Any], found: Any) -> bool:
    """Registers an object under a class or protocol; returns whether it is new there."""
    is_new = found not in _by_kind[kind]
    _by_kind[kind][found] = None
    return is_new


def live_objects(kind: type[Any]) -> list[Any]:
    """Returns the objects of a kind that are alive, in the order in which they were registered."""
    return list(_by_kind[kind])
