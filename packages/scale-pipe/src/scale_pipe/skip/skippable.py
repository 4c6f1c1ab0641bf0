"""Skip connections: a layer stashes a tensor, and a later one pops it, wherever the model is cut between them.

A layer's `forward` is a generator that yields its stashes and pops to the code that runs it. So a pipeline never
sends a tensor through stages that do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import isgenerator
from typing import Any, TypeVar

from torch import nn

from scale_pipe.skip.namespace import DeclaredSkips, Namespace, declared_skips, namespaces_of
from scale_pipe.skip.tracker import check_all_used, run_generator

M = TypeVar("M", bound=nn.Module)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Class decorator of modules whose `forward` is a generator that yields `stash(...)` and `pop(...)`.

        >>> import torch
        >>> from scale_pipe import pop, skippable, stash
        >>> @skippable(stash=["input"])
        ... class Keep(torch.nn.Module):
        ...     def forward(self, input):
        ...         yield stash("input", input)
        ...         return input * 2
        >>> @skippable(pop=["input"])
        ... class Add(torch.nn.Module):
        ...     def forward(self, input):
        ...         kept = yield pop("input")
        ...         return input + kept
        >>> torch.nn.Sequential(Keep(), torch.nn.Tanh(), Add())(torch.zeros(2))
        tensor([0., 0.])

    The class stays the same, with its names and keys. It gets a method `isolate(namespace, *, only=None)`, which puts a
    module's names, or `only` some of them, into a namespace, and returns the module.

    Args:
        stash: Names that it stashes, all of them in each forward.
        pop: Names that it pops, all of them in each forward.

    Raises:
        TypeError: Names are not a list of strings, or the decorated object is not a class of modules.

    See also: [the guide to pipelines](../guides/pipe.md).
    """
    declared = DeclaredSkips(_names("@skippable: stash", stash), _names("@skippable: pop", pop))

    def decorate(cls: type[M]) -> type[M]:
        argument: object = cls
        if not (isinstance(argument, type) and issubclass(argument, nn.Module)):
            raise TypeError(f"@skippable: expected a class derived from torch.nn.Module, got {cls!r}")
        skippable_class: Any = cls
        plain = skippable_class.forward
        # A forward that calls that of a skippable base class may leave it to that one to stash and pop.
        is_first = getattr(cls, "_declared_skips", None) is None

        @wraps(plain)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = plain(self, *args, **kwargs)
            if isgenerator(output):
                return run_generator(self, declared, output)
            if is_first:
                check_all_used(self, set(declared.stash), set(declared.pop))
            return output

        skippable_class.forward, skippable_class.isolate, skippable_class._declared_skips = forward, _isolate, declared
        return cls

    return decorate


def _names(title: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f'{title} takes a list of names, got {names!r}: write {title.split()[-1]}=["{names}"]')
    skip_names = tuple(names)
    for name in skip_names:
        if not isinstance(name, str):
            raise TypeError(f"{title} takes names, got {name!r}")
    return tuple(dict.fromkeys(skip_names))


def _isolate(self: nn.Module, namespace: Namespace, *, only: Iterable[str] | None = None) -> nn.Module:
    """Puts the names that this module stashes and pops, or `only` some, into a namespace; returns the module."""
    if not isinstance(namespace, Namespace):
        raise TypeError(
            f"isolate: expected a Namespace, got {namespace!r}: namespace = scale_pipe.Namespace(), one for all layers "
            "that stash and pop the same"
        )
    declared = declared_skips(self)
    assert declared is not None
    all_names = (*declared.stash, *declared.pop)
    names = all_names if only is None else _names("isolate: only", only)
    for name in names:
        if name not in all_names:
            raise ValueError(f"isolate: {name!r} is not among the names of a {type(self).__name__}: {all_names}")
    self.__dict__["_skip_namespaces"] = {**namespaces_of(self), **dict.fromkeys(names, namespace)}
    return self
