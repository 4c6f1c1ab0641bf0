"""Tensors inside whatever a module takes or returns.

`torch.utils._pytree` knows tuples, named tuples, lists, dicts and the output classes that libraries register with it.
What nobody registered is taken apart here: dataclasses, and classes of one's own that are lists, tuples or mappings.
Everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_ATOMS = frozenset((type(None), bool, int, float, str))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns `tree` with `function` applied to each tensor in it; containers keep their type.

    A tensor that stands in several places is mapped once, so those who compare by `is` still find it the same. A tree
    in which nothing changes (`function` returns each tensor itself) is returned as the very same object; otherwise
    the containers on the way to what changes are new, and made without a call of their constructors.
    """
    mapped: dict[int, Tensor] = {}

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in mapped:
            mapped[id(tensor)] = function(tensor)
        return mapped[id(tensor)]

    return _map(once, tree)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields each tensor in `tree`, in order; one that stands in several places is yielded each time."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
            continue
        for _, part in _items(leaf):
            yield from tensors_in(part)
        for _, part in _fields(leaf):
            yield from tensors_in(part)


def _map(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    kind = type(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if kind in _ATOMS:
        return tree
    # What modules take and return as a rule; the general way costs twenty times as much, and each unit takes it.
    if kind is tuple or kind is list:
        parts = [_map(function, part) for part in tree]
        return tree if all(map(operator.is_, parts, tree)) else kind(parts)
    if kind is dict:
        items = {key: _map(function, part) for key, part in tree.items()}
        return tree if all(map(operator.is_, items.values(), tree.values())) else items
    leaves, spec = pytree.tree_flatten(tree)
    mapped = [_map_leaf(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return tree
    return pytree.tree_unflatten(mapped, spec)


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    # A class may be both, a mapping with the same tensors as attributes, as the outputs of transformers are.
    items = {key: new for key, old in _items(leaf) if (new := _map(function, old)) is not old}
    fields = {name: new for name, old in _fields(leaf) if (new := _map(function, old)) is not old}
    if not items and not fields:
        return leaf
    fresh = _copy(leaf, items)
    for name, value in fields.items():
        object.__setattr__(fresh, name, value)  # A frozen dataclass, too, is not finished yet.
    return fresh


def _items(leaf: Any) -> Iterator[tuple[Any, Any]]:
    """What a container of an unregistered class holds, by key or by place."""
    if isinstance(leaf, MutableMapping):
        yield from leaf.items()
    elif isinstance(leaf, list | tuple):
        yield from enumerate(leaf)


def _fields(leaf: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        for field in dataclasses.fields(leaf):
            yield field.name, getattr(leaf, field.name, None)


def _copy(leaf: Any, changed: dict[Any, Any]) -> Any:
    """A shallow copy with other items.

    Not by the class's own constructor, nor `dataclasses.replace`: it may want arguments that nobody knows here, and
    what it does it has done already.
    """
    cls: Any = type(leaf)
    if isinstance(leaf, tuple):
        fresh = tuple.__new__(cls, [changed.get(place, part) for place, part in enumerate(leaf)])
        getattr(fresh, "__dict__", {}).update(getattr(leaf, "__dict__", {}))
        return fresh
    if not isinstance(leaf, dict):
        fresh = copy.copy(leaf)
        for key, value in changed.items():
            fresh[key] = value
        return fresh
    fresh = cls.__new__(cls)
    getattr(fresh, "__dict__", {}).update(getattr(leaf, "__dict__", {}))
    if isinstance(leaf, defaultdict):
        fresh.default_factory = leaf.default_factory
    base = OrderedDict if isinstance(leaf, OrderedDict) else dict
    for key, value in leaf.items():
        base.__setitem__(fresh, key, changed.get(key, value))
    return fresh
