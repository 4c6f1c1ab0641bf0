"""Tensors inside whatever a module takes or returns.

`torch.utils._pytree` knows tuples, named tuples, lists, dicts and the output classes that libraries register with it.
Dataclasses are taken apart here, because a model may return one that nobody registered; everything else is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Returns `tree` with `function` applied to each tensor in it; containers keep their type.

    A tree in which nothing changes (`function` returns each tensor itself) is returned as the very same object.
    """
    if isinstance(tree, Tensor):
        return function(tree)
    leaves, spec = pytree.tree_flatten(tree)
    mapped = [_map_leaf(function, leaf) for leaf in leaves]
    if all(new is old for new, old in zip(mapped, leaves, strict=True)):
        return tree
    return pytree.tree_unflatten(mapped, spec)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yields each tensor in `tree`, in order; one that stands twice is yielded twice."""
    if isinstance(tree, Tensor):
        yield tree
        return
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf
        elif _is_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                yield from tensors_in(getattr(leaf, field.name, None))


def _map_leaf(function: Callable[[Tensor], Tensor], leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return function(leaf)
    if not _is_dataclass(leaf):
        return leaf
    changed = {}
    for field in dataclasses.fields(leaf):
        old = getattr(leaf, field.name, None)
        new = map_tensors(function, old)
        if new is not old:
            changed[field.name] = new
    if not changed:
        return leaf
    # A shallow copy and not `replace`: __init__ and __post_init__ must not run again, and frozen ones must work.
    fresh = copy.copy(leaf)
    for name, value in changed.items():
        object.__setattr__(fresh, name, value)
    return fresh


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
