"""Skip connections: a layer stashes a tensor, and a later one pops it, wherever the model is cut between them.

A layer's `forward` is a generator that says what it stashes and pops. Who runs it answers: inside of `run_with_skips`
what is popped comes from elsewhere, and what is stashed is handed out; outside, a dict of the thread carries it. So a
pipeline never has to send a tensor through the stages that do not use it.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from inspect import isgenerator
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import nn

from scale_checkpoint import is_recomputing

M = TypeVar("M", bound=nn.Module)
R = TypeVar("R")


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
                return _follow(self, declared, output)
            if is_first:
                _check_all_done(self, set(declared.stash), set(declared.pop))
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
    self.__dict__["_skip_namespaces"] = {**_namespaces(self), **dict.fromkeys(names, namespace)}
    return self


def _namespaces(module: nn.Module) -> dict[str, Namespace]:
    found: dict[str, Namespace] = module.__dict__.get("_skip_namespaces", {})
    return found


def declared_by(module: nn.Module) -> Declared | None:
    """Returns what a module itself stashes and pops; None if it is not skippable."""
    found: Declared | None = getattr(type(module), "_declared_skips", None)
    return found


def _key(module: nn.Module, name: str) -> SkipKey:
    return _namespaces(module).get(name), name


def stashed_by(module: nn.Module) -> list[SkipKey]:
    """Returns what a module and all that it holds stash, in the order of the modules."""
    return [_key(part, name) for part in module.modules() if (names := declared_by(part)) for name in names.stash]


def popped_by(module: nn.Module) -> list[SkipKey]:
    """Returns what a module and all that it holds pop, in the order of the modules."""
    return [_key(part, name) for part in module.modules() if (names := declared_by(part)) for name in names.pop]


class _Carrier:
    """Holds what was stashed until it is popped."""

    def __init__(self, popped: Mapping[SkipKey, Any], *, lasting: bool = False) -> None:
        self.values, self.stashed, self.lasting = dict(popped), set[SkipKey](), lasting

    def stash(self, key: SkipKey, value: Any) -> None:
        if self.lasting and is_recomputing():
            return  # The pop has had it in the forward, and nobody comes for it again.
        self.values[key] = value
        self.stashed.add(key)

    def pop(self, key: SkipKey) -> Any:
        self.stashed.discard(key)
        return self.values.pop(key)

    def left(self) -> dict[SkipKey, Any]:
        return {key: value for key, value in self.values.items() if key in self.stashed}


class _Current(threading.local):
    """Of one thread: recomputation on an accelerator runs in a thread of its own."""

    def __init__(self) -> None:
        self.carrier = _Carrier({}, lasting=True)


_current = _Current()


@contextmanager
def _carrying(carrier: _Carrier) -> Iterator[None]:
    before, _current.carrier = _current.carrier, carrier
    try:
        yield
    finally:
        _current.carrier = before


def run_with_skips(
    partition: Callable[..., R], popped: Mapping[SkipKey, Any], *args: Any, **kwargs: Any
) -> tuple[R, dict[SkipKey, Any]]:
    """Calls a partition with what it pops, and returns what it stashes for others beside its output.

    Nothing is kept from one call to the next, so it can be recomputed as any function of tensors.

    Args:
        partition: Called with `args` and `kwargs`.
        popped: By key, what others have stashed for it.

    Returns:
        Its output, and by key what it has stashed and not popped itself.
    """
    carrier = _Carrier(popped)
    with _carrying(carrier):
        output = partition(*args, **kwargs)
    return output, carrier.left()


def _follow(module: nn.Module, declared: Declared, layer: Generator[Any, Any, Any]) -> Any:
    """Runs a skippable layer's generator, and does what it says; errors come out of its own `yield`."""
    carrier = _current.carrier
    to_stash, to_pop = set(declared.stash), set(declared.pop)
    try:
        command = next(layer)
        while True:
            error, answer = _problem(command, declared, carrier, module), None
            if error is not None:
                command = layer.throw(error)
                continue
            if isinstance(command, stash):
                carrier.stash(_key(module, command.name), command.tensor)
                to_stash.discard(command.name)
            else:
                answer = carrier.pop(_key(module, command.name))
                to_pop.discard(command.name)
            del command  # So that nothing holds the tensor but who needs it.
            command = layer.send(answer)
    except StopIteration as end:
        output = end.value
    _check_all_done(module, to_stash, to_pop)
    return output


def _check_all_done(module: nn.Module, to_stash: set[str], to_pop: set[str]) -> None:
    for names, did, verb in ((to_stash, "stashed", "stash"), (to_pop, "popped", "pop")):
        if names:
            words = ", ".join(map(repr, sorted(names)))
            raise RuntimeError(
                f"{words} must be {did} but have not: a {type(module).__name__} declares what each of its forwards "
                f"does; let it yield {verb}(...), or leave it out of @skippable"
            )


def _problem(command: Any, declared: Declared, carrier: _Carrier, module: nn.Module) -> Exception | None:
    title = type(module).__name__
    if isinstance(command, stash):
        if command.name not in declared.stash:
            names = [*declared.stash, command.name]
            return RuntimeError(
                f"{command.name!r} has not been declared as stashable by {title}: write @skippable(stash={names})"
            )
        return None
    if not isinstance(command, pop):
        return TypeError(f"{command!r} is no command: a skippable {title} yields stash(name, tensor) or pop(name)")
    if command.name not in declared.pop:
        names = [*declared.pop, command.name]
        return RuntimeError(
            f"{command.name!r} has not been declared as poppable by {title}: write @skippable(pop={names})"
        )
    if _key(module, command.name) in carrier.values:
        return None
    mend = "let a layer before it stash it; verify_skippables(module) says which pairs do not match"
    if is_recomputing():
        mend = "a layer that is recomputed alone cannot pop twice: let Pipe(checkpoint=...) recompute whole partitions"
    return RuntimeError(f"{command.name!r} has not been stashed when {title} pops it: {mend}")
