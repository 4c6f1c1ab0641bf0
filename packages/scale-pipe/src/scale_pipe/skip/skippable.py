"""Skip connections: a layer stashes a tensor, and a later one pops it, wherever the model is cut between them.

A layer's `forward` is a generator that says what it stashes and pops, and who runs it answers. So a pipeline never has
to send a tensor through the stages that do not use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import isgenerator
from typing import Any, TypeVar

from torch import nn

from scale_pipe.skip.namespace import Declared, Namespace, declared_by, namespaces_of
from scale_pipe.skip.tracker import check_all_done, follow

M = TypeVar("M", bound=nn.Module)


def skippable(stash: Iterable[str] = (), pop: Iterable[str] = ()) -> Callable[[type[M]], type[M]]:
    """Makes a class of modules stash and pop: its `forward` is a generator that yields `stash(...)` and `pop(...)`.

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

    The class stays itself, with its names and keys, and gets a method `isolate(namespace, *, only=None)`, which puts
    the names of one of its modules, or `only` some, into a namespace, and returns the module.

    Args:
        stash: Names that it stashes, all of them in each forward.
        pop: Names that it pops, all of them in each forward.

    Raises:
        TypeError: Names are no list of words; what is decorated is no class of modules.
    """
    declared = Declared(_names("@skippable: stash", stash), _names("@skippable: pop", pop))

    def decorate(cls: type[M]) -> type[M]:
        given: object = cls
        if not (isinstance(given, type) and issubclass(given, nn.Module)):
            raise TypeError(f"@skippable: expected a class derived from torch.nn.Module, got {cls!r}")
        made: Any = cls
        plain = made.forward
        # A forward that calls that of a skippable class before it may leave it to that one to stash and pop.
        is_first = getattr(cls, "_declared_skips", None) is None

        @wraps(plain)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            output = plain(self, *args, **kwargs)
            if isgenerator(output):
                return follow(self, declared, output)
            if is_first:
                check_all_done(self, set(declared.stash), set(declared.pop))
            return output

        made.forward, made.isolate, made._declared_skips = forward, _isolate, declared
        return cls

    return decorate


def _names(title: str, names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f'{title} takes a list of names, got {names!r}: write {title.split()[-1]}=["{names}"]')
    found = tuple(names)
    for name in found:
        if not isinstance(name, str):
            raise TypeError(f"{title} takes names, got {name!r}")
    return tuple(dict.fromkeys(found))


def _isolate(self: nn.Module, namespace: Namespace, *, only: Iterable[str] | None = None) -> nn.Module:
    """Puts what this module stashes and pops into a namespace.

    Args:
        namespace: Shared with those that pop and stash the same.
        only: Of the names, which ones; None is all.

    Returns:
        The module.

    Raises:
        TypeError: It is no namespace; `only` is no list of names.
        ValueError: A name in `only` is not declared.
    """
    if not isinstance(namespace, Namespace):
        raise TypeError(
            f"isolate: expected a Namespace, got {namespace!r}: namespace = scale_pipe.Namespace(), one for all layers "
            "that stash and pop the same"
        )
    declared = declared_by(self)
    assert declared is not None
    all_names = (*declared.stash, *declared.pop)
    names = all_names if only is None else _names("isolate: only", only)
    for name in names:
        if name not in all_names:
            raise ValueError(f"isolate: {name!r} is not among the names of a {type(self).__name__}: {all_names}")
    self.__dict__["_skip_namespaces"] = {**namespaces_of(self), **dict.fromkeys(names, namespace)}
    return self
