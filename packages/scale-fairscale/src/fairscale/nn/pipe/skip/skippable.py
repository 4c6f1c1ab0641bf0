"""`skippable` as FairScale has it: the decorated class makes a `Skippable`, which holds the layer as its `module`.

So the keys of a state dict have the word `module`, as in FairScale's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

from torch import nn

import scale_pipe
from scale_pipe import Namespace, pop, stash, verify_skippables
from scale_pipe.skip.namespace import SkipKey, namespaces_of, popped_keys, stashed_keys

__all__ = ["Skippable", "pop", "skippable", "stash", "verify_skippables"]


class Skippable(nn.Module):
    """A skippable layer; `skippable` makes its subclasses.

    Attributes:
        module: The layer itself, of the decorated class.
    """

    module_cls: ClassVar[type[nn.Module]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.module = self.module_cls(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer."""
        return self.module(*args, **kwargs)

    def isolate(self, ns: Namespace, *, only: Iterable[str] | None = None) -> Skippable:
        """Puts the layer's names, or `only` some, into a namespace; returns this layer."""
        layer: Any = self.module
        layer.isolate(ns, only=only)
        return self

    @property
    def namespaces(self) -> dict[str, Namespace]:
        """By name the namespaces of isolated names."""
        return namespaces_of(self.module)

    def stashable(self) -> list[SkipKey]:
        """Returns what the layer stashes, with namespaces."""
        return stashed_keys(self.module)

    def poppable(self) -> list[SkipKey]:
        """Returns what the layer pops, with namespaces."""
        return popped_keys(self.module)

    def __repr__(self) -> str:
        return f"@skippable({self.module!r})"


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[nn.Module]], type[Skippable]]:
    """Class decorator of layers whose `forward` yields `stash(...)` and `pop(...)`, as `scale_pipe.skippable` has them.

    Args:
        stash: Names that it stashes.
        pop: Names that it pops.
    """
    decorate = scale_pipe.skippable(stash, pop)

    def extend_skippable(module_cls: type[nn.Module]) -> type[Skippable]:
        names = {"__module__": module_cls.__module__, "__qualname__": module_cls.__qualname__}
        skippable_class: Any = type(module_cls.__name__, (Skippable,), {"module_cls": decorate(module_cls), **names})
        extended: type[Skippable] = skippable_class
        return extended

    return extend_skippable
