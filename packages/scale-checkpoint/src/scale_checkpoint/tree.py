"""Tensors inside whatever a module is given, taken out of it and put back.

What a recomputation is given is what the module was given then: the tensors are kept by autograd, which notices when
one of them is changed in place, and the containers are new ones, so that a dict that the caller goes on filling makes
no difference. `torch.utils._pytree` knows tuples, named tuples, lists, dicts and the output classes that libraries
register with it; dataclasses are taken apart here; everything else stays what it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

_ATOMS = frozenset((type(None), bool, int, float, str))


class _Place:
    """Stands in a container for the tensor of that number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


def take_tensors(tree: Any) -> tuple[list[Tensor], Any]:
    """Returns the tensors in `tree`, each once, and the tree without them, for `put_tensors`."""
    tensors: list[Tensor] = []
    numbers: dict[int, _Place] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in numbers:
            numbers[id(leaf)] = _Place(len(tensors))
            tensors.append(leaf)
        return numbers[id(leaf)]

    return tensors, map_leaves(take, tree)


def put_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns what `take_tensors` was given, with `tensors` in the places of those that it took."""
    return map_leaves(lambda leaf: tensors[leaf.number] if isinstance(leaf, _Place) else leaf, tree)


def strangers_in(tree: Any) -> list[str]:
    """Returns the classes of the leaves that hold something of their own, so that they may change; each once, by name.

    Args:
        tree: Of `take_tensors`.
    """
    found: dict[str, None] = {}

    def note(leaf: Any) -> Any:
        is_known = isinstance(leaf, (Tensor, _Place, nn.Module, type)) or callable(leaf)
        if hasattr(leaf, "__dict__") and not is_known:
            found[type(leaf).__name__] = None
        return leaf

    map_leaves(note, tree)
    return list(found)


def tensors_in(tree: Any) -> list[Tensor]:
    """Returns the tensors in `tree`, each once."""
    return take_tensors(tree)[0]


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Returns `tree` with `function` applied to each leaf; its containers are new ones of the same type."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        return function(tree)
    if kind in _ATOMS:
        return tree
    if kind is tuple or kind is list:
        return kind([map_leaves(function, part) for part in tree])
    if kind is dict:
        return {key: map_leaves(function, part) for key, part in tree.items()}
    leaves, spec = pytree.tree_flatten(tree)
    if len(leaves) == 1 and leaves[0] is tree:
        return _map_fields(function, tree) if dataclasses.is_dataclass(tree) else function(tree)
    return pytree.tree_unflatten([map_leaves(function, leaf) for leaf in leaves], spec)


def _map_fields(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, type):
        return tree
    # Not by `dataclasses.replace`: what the constructor does it has done already, and it may want other arguments.
    fresh = copy.copy(tree)
    for field in dataclasses.fields(tree):
        if hasattr(tree, field.name):  # A frozen one, too, is not finished yet.
            object.__setattr__(fresh, field.name, map_leaves(function, getattr(tree, field.name)))
    return fresh
