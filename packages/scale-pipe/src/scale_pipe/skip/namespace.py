"""Names of skip connections: the commands `stash` and `pop`, namespaces, and declarations of modules."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple, TypeAlias

from torch import nn


class Namespace:
    """A namespace of skips: "skip" in one namespace is not the "skip" of a different namespace.

    Copies of a namespace, pickled ones too, are the same namespace.

    Examples:
        >>> from torch import nn
        >>> from scale_pipe import Namespace, pop, skippable, stash, verify_skippables
        >>> @skippable(stash=["skip"])
        ... class Down(nn.Linear):
        ...     def forward(self, input):
        ...         yield stash("skip", input)
        ...         return super().forward(input)
        >>> @skippable(pop=["skip"])
        ... class Up(nn.Linear):
        ...     def forward(self, input):
        ...         skip = yield pop("skip")
        ...         return super().forward(input) + skip
        >>> outer, inner = Namespace(), Namespace()  # two skips with the name "skip"
        >>> down = [Down(8, 4).isolate(outer), Down(4, 2).isolate(inner)]
        >>> up = [Up(2, 4).isolate(inner), Up(4, 8).isolate(outer)]
        >>> verify_skippables(nn.Sequential(*down, *up))

    See also: [the guide to pipelines](../guides/pipe.md).
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
"""A namespace and a name in it; None is the namespace of all that were not isolated."""


class stash:  # noqa: N801  # It reads as a command: `yield stash("skip", x)`.
    """A command that a skippable layer's `forward` yields: keep a tensor for the layer that pops it.

    Args:
        name: As declared.
        tensor: Of any shape; None may be stashed as well, and tensors nested in containers.

    Examples:
        >>> from torch import nn
        >>> from scale_pipe import skippable, stash
        >>> @skippable(stash=["skip"])
        ... class Keep(nn.Module):
        ...     def forward(self, input):
        ...         yield stash("skip", input)
        ...         return input

    See also: [the guide to pipelines](../guides/pipe.md).
    """

    __slots__ = ("name", "tensor")

    def __init__(self, name: str, tensor: Any) -> None:
        self.name, self.tensor = name, tensor


class pop:  # noqa: N801  # It reads as a command: `skip = yield pop("skip")`.
    """A command that a skippable layer's `forward` yields, to get the tensor stashed by this name.

    Args:
        name: As declared.

    Examples:
        >>> from torch import nn
        >>> from scale_pipe import pop, skippable
        >>> @skippable(pop=["skip"])
        ... class Add(nn.Module):
        ...     def forward(self, input):
        ...         skip = yield pop("skip")  # of the layer that has stashed it
        ...         return input + skip

    See also: [the guide to pipelines](../guides/pipe.md).
    """

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class DeclaredSkips(NamedTuple):
    """The names that a skippable class stashes and pops."""

    stash: tuple[str, ...]
    pop: tuple[str, ...]


def namespaces_of(module: nn.Module) -> dict[str, Namespace]:
    """Returns by name the namespaces of a module's isolated names."""
    namespaces: dict[str, Namespace] = module.__dict__.get("_skip_namespaces", {})
    return namespaces


def declared_skips(module: nn.Module) -> DeclaredSkips | None:
    """Returns the names of a module itself; None if it is not skippable."""
    declared: DeclaredSkips | None = getattr(type(module), "_declared_skips", None)
    return declared


def skip_key(module: nn.Module, name: str) -> SkipKey:
    """Returns the key of a module's name."""
    return namespaces_of(module).get(name), name


def stashed_keys(module: nn.Module) -> list[SkipKey]:
    """Returns the skips that a module and its submodules stash, in their order."""
    return [
        skip_key(part, name) for part in module.modules() if (names := declared_skips(part)) for name in names.stash
    ]


def popped_keys(module: nn.Module) -> list[SkipKey]:
    """Returns the skips that a module and its submodules pop, in their order."""
    return [skip_key(part, name) for part in module.modules() if (names := declared_skips(part)) for name in names.pop]
