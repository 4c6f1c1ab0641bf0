"""What a model is given or returns, leaf by leaf, with the words by which errors name it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

_ATOMS = frozenset((type(None), bool, int, float, str))


def leaves_of(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields what `tree` holds, with the way to it as one would write it; containers are taken apart."""
    kind = type(tree)
    if isinstance(tree, Tensor) or kind in _ATOMS:
        yield path, tree
    elif isinstance(tree, MutableMapping):
        for key, part in tree.items():
            yield from leaves_of(part, f"{path}[{key!r}]")
    elif isinstance(tree, tuple) and hasattr(tree, "_fields"):
        for name, part in zip(tree._fields, tree, strict=True):
            yield from leaves_of(part, f"{path}.{name}")
    elif isinstance(tree, list | tuple):
        for number, part in enumerate(tree):
            yield from leaves_of(part, f"{path}[{number}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from leaves_of(getattr(tree, field.name, None), f"{path}.{field.name}")
    else:
        leaves = pytree.tree_leaves(tree)
        if len(leaves) == 1 and leaves[0] is tree:
            yield path, tree
            return
        for number, leaf in enumerate(leaves):  # Of a class that was registered with torch.
            yield from leaves_of(leaf, f"{path}.leaves[{number}]")


def kind_of(leaf: Any) -> str:
    """Says what a tensor or anything else is: "Tensor [] float32"."""
    return f"Tensor {described(leaf)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def described(tensor: Tensor) -> str:
    """Says what a tensor is: "[3, 5] float32"."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
