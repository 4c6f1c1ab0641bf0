"""Tensors in nested containers: the inputs and outputs of modules.

`torch.utils._pytree` knows tuples, named tuples, lists, dicts and the output classes that libraries register with it.
Unregistered dataclasses and subclasses of lists, tuples and mappings are taken apart here. Everything else is a leaf;
a set that holds tensors is a `TypeError`, since the order of its tensors has to be equal on all ranks.
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

    A tensor in several places is mapped once, so that identity is preserved. If `function` returns each tensor itself,
    the result is the same object. If not, only the containers on the way to a change are new. Their constructors are
    not called.

    Examples:
        >>> import torch
        >>> from scale_core.tree import map_tensors
        >>> map_tensors(torch.Tensor.double, {"x": torch.ones(2), "name": "a"})
        {'x': tensor([1., 1.], dtype=torch.float64), 'name': 'a'}

    See also: [the core](../how-the-core-works.md).
    """
    mapped: dict[int, tuple[Tensor, Tensor]] = {}  # With the tensor, whose id another one would have after it.

    def once(tensor: Tensor) -> Tensor:
        if id(tensor) not in mapped:
            mapped[id(tensor)] = tensor, function(tensor)
        return mapped[id(tensor)][1]

    return _map(once, tree, copies=False)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns a copy of `tree`, all its containers new ones of the same type, with `function` applied to each leaf.

    Later changes of `tree` make no difference to it.

    Examples:
        >>> from scale_core.tree import map_leaves
        >>> map_leaves(str, {"x": [1, 2], "y": 3})
        {'x': [1, 2], 'y': 3}

    See also: [the core](../how-the-core-works.md).
    """
    return _map(function, tree, copies=True)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields each tensor in `tree`, in order; one in several places is yielded each time.

    Examples:
        >>> import torch
        >>> from scale_core.tree import tensors_in
        >>> [tensor.shape for tensor in tensors_in({"x": [torch.ones(2)], "y": 3})]
        [torch.Size([2])]

    See also: [the core](../how-the-core-works.md).
    """
    if isinstance(tree, Tensor):
        yield tree
        return
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
            continue
        _refuse_set(leaf)
        for _, part in (*_items(leaf), *_fields(leaf)):
            yield from tensors_in(part)


def _map(function: Callable[[Any], Any], tree: Any, copies: bool) -> Any:
    """Copies containers on the way to a change, or all; without `copies`, only tensors are leaves."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if kind in _ATOMS:
        return tree
    # The usual inputs and outputs of modules; the general way costs twenty times as much, and each unit takes it.
    if kind is tuple or kind is list:
        parts = [_map(function, part, copies) for part in tree]
        return tree if not copies and all(map(operator.is_, parts, tree)) else kind(parts)
    if kind is dict:
        items = {key: _map(function, part, copies) for key, part in tree.items()}
        return tree if not copies and all(map(operator.is_, items.values(), tree.values())) else items
    leaves, spec = pytree.tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return _map_leaf(function, tree, copies)
    mapped = [_map_leaf(function, leaf, copies) for leaf in leaves]
    if not copies and all(map(operator.is_, mapped, leaves)):
        return tree
    return pytree.tree_unflatten(mapped, spec)


def _map_leaf(function: Callable[[Any], Any], leaf: Any, copies: bool) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    _refuse_set(leaf)
    # A class may be both, a mapping with the same tensors as attributes, as the outputs of transformers are.
    items = {key: new for key, old in _items(leaf) if (new := _map(function, old, copies)) is not old or copies}
    fields = {name: new for name, old in _fields(leaf) if (new := _map(function, old, copies)) is not old or copies}
    if not items and not fields:
        return function(leaf) if copies else leaf
    fresh = _copy(leaf, items)
    for name, value in fields.items():
        object.__setattr__(fresh, name, value)  # A frozen dataclass, too, is not finished yet.
    return fresh


def _items(leaf: Any) -> Iterator[tuple[Any, Any]]:
    """The items of a container of an unregistered class, by key or index."""
    if isinstance(leaf, MutableMapping):
        yield from leaf.items()
    elif isinstance(leaf, list | tuple):
        yield from enumerate(leaf)


def _refuse_set(leaf: Any) -> None:
    """Raises for a set that holds tensors, whose order follows their addresses."""
    if isinstance(leaf, set | frozenset) and any(True for part in leaf for _ in tensors_in(part)):
        raise TypeError(
            f"a {type(leaf).__name__} of tensors has a different order on each rank, so ranks can't match the tensors: "
            "put them into a list, a tuple or a dict"
        )


def _fields(leaf: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        for field in dataclasses.fields(leaf):
            if hasattr(leaf, field.name):
                yield field.name, getattr(leaf, field.name)


def _copy(leaf: Any, changed: dict[Any, Any]) -> Any:
    """A shallow copy with other items."""
    # Not by the class's own constructor, nor `dataclasses.replace`: it may want unknown arguments, and
    # what it does it has done already.
    cls: Any = type(leaf)
    if isinstance(leaf, tuple):
        fresh = tuple.__new__(cls, [changed.get(index, part) for index, part in enumerate(leaf)])
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
