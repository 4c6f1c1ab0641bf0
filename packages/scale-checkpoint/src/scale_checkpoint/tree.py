"""Tensors among a module's arguments, taken out of their containers and put back into new ones.

A recomputation gets the module's original inputs: autograd keeps the tensors, and notices when one is changed in
place; the containers are new ones, so that a dict that the caller goes on filling makes no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from scale_core.tree import map_leaves, tensors_in


class _Placeholder:
    """Stands in a container for the tensor of that index."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


def extract_tensors(tree: Any) -> tuple[list[Tensor], Any]:
    """Returns the tensors in `tree`, each once, and a copy of its containers without them, for `insert_tensors`."""
    tensors: list[Tensor] = []
    placeholders: dict[int, _Placeholder] = {}

    def take(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) not in placeholders:
            placeholders[id(leaf)] = _Placeholder(len(tensors))
            tensors.append(leaf)
        return placeholders[id(leaf)]

    return tensors, map_leaves(take, tree)


def insert_tensors(tree: Any, tensors: Sequence[Tensor]) -> Any:
    """Returns the input of `extract_tensors`, in new containers, with `tensors` in the places of its tensors."""
    return map_leaves(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Placeholder) else leaf, tree)


def unique_tensors(tree: Any) -> list[Tensor]:
    """Returns the tensors in `tree`, each once."""
    return list(dict.fromkeys(tensors_in(tree)))


def unknown_classes(tree: Any) -> list[str]:
    """Returns the classes of leaves of `extract_tensors` that have attributes, and so may change; each once."""
    names: dict[str, None] = {}
    for leaf in pytree.tree_leaves(tree):
        is_known = isinstance(leaf, nn.Module) or callable(leaf) or is_dataclass(leaf)
        if hasattr(leaf, "__dict__") and not is_known:
            names[type(leaf).__name__] = None
    return list(names)
