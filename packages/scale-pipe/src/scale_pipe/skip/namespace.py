"""The words of skip connections: what layers say that they stash and pop, and the keys by which it is known."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple, TypeAlias

from torch import nn


class Namespace:
    """Keeps names apart: "skip" in one namespace is another than "skip" in the next one.

    Copies of a namespace, pickled ones too, are the same namespace.
    """

    __slots__ = ("_id",)

    def __init__(self) -> None:
        self._id = uuid.uuid4()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._id == other._id

    def __hash__(self) -> int:
        return hash(self._id)

    def __repr__(self) -> str:
        return f"<Namespace {self._id.hex[:8]}>"


SkipKey: TypeAlias = tuple[Namespace | None, str]
"""What is stashed and popped: a name in a namespace; None is the one of all that were not isolated."""


class stash:  # noqa: N801  # It reads as a command: `yield stash("skip", x)`.
    """Said by a skippable layer's `forward`: keep this for the layer that pops it.

    Args:
        name: As declared.
        tensor: Any shape; None may be stashed as well, and tensors nested in containers.
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Any) -> None:
        self.name, self.tensor = name, tensor


class pop:  # noqa: N801  # It reads as a command: `skip = yield pop("skip")`.
    """Said by a skippable layer's `forward`: give me what was stashed by this name.

    Args:
        name: As declared.
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Declared(NamedTuple):
    """What a skippable layer says that it does.

    Attributes:
        stash: Names.
        pop: Names.
    """

    stash: tuple[str, ...]
    pop: tuple[str, ...]


def namespaces_of(module: nn.Module) -> dict[str, Namespace]:
    """Returns the namespaces that names of this module were put into; the others are in none."""
    found: dict[str, Namespace] = module.__dict__.get("_skip_namespaces", {})
    return found


def declared_by(module: nn.Module) -> Declared | None:
    """Returns what a module itself stashes and pops; None if it is not skippable."""
    found: Declared | None = getattr(type(module), "_declared_skips", None)
    return found


def key_of(module: nn.Module, name: str) -> SkipKey:
    """Returns what a name of this module is known by."""
    return namespaces_of(module).get(name), name


def stashed_by(module: nn.Module) -> list[SkipKey]:
    """Returns what a module and all that it holds stash, in the order of the modules."""
    return [key_of(part, name) for part in module.modules() if (names := declared_by(part)) for name in names.stash]


def popped_by(module: nn.Module) -> list[SkipKey]:
    """Returns what a module and all that it holds pop, in the order of the modules."""
    return [key_of(part, name) for part in module.modules() if (names := declared_by(part)) for name in names.pop]
