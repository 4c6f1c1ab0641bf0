"""Weak references to objects of this process, by kind, for code that must find all of them.

For example, an optimizer's first step looks for the owners of its parameters.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from weakref import WeakKeyDictionary

_by_kind: defaultdict[type[Any], WeakKeyDictionary[Any, None]] = defaultdict(WeakKeyDictionary)


def register_live(kind: type[Any], obj: Any) -> bool:
    """Registers an object under a class or protocol; returns whether it is new there."""
    is_new = obj not in _by_kind[kind]
    _by_kind[kind][obj] = None
    return is_new


def live_objects(kind: type[Any]) -> list[Any]:
    """Returns the objects of a kind that are alive, in the order in which they were registered."""
    return list(_by_kind[kind])
