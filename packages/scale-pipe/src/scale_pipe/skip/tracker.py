"""Carries what skippable layers stash to those that pop it.

Who runs a layer answers what its `forward` yields: inside of `run_with_skips` what is popped comes from elsewhere, and
what is stashed is handed out; outside, a dict of the thread carries it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from scale_checkpoint import is_recomputing
from scale_pipe.skip.namespace import Declared, SkipKey, key_of, pop, stash

R = TypeVar("R")


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


def follow(module: nn.Module, declared: Declared, layer: Generator[Any, Any, Any]) -> Any:
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
                carrier.stash(key_of(module, command.name), command.tensor)
                to_stash.discard(command.name)
            else:
                answer = carrier.pop(key_of(module, command.name))
                to_pop.discard(command.name)
            del command  # So that nothing holds the tensor but who needs it.
            command = layer.send(answer)
    except StopIteration as end:
        output = end.value
    check_all_done(module, to_stash, to_pop)
    return output


def check_all_done(module: nn.Module, to_stash: set[str], to_pop: set[str]) -> None:
    """Refuses a forward that has left out some of what its class declares.

    Raises:
        RuntimeError: There are names left to stash or to pop.
    """
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
    if key_of(module, command.name) in carrier.values:
        return None
    mend = "let a layer before it stash it; verify_skippables(module) says which pairs do not match"
    if is_recomputing():
        mend = "a layer that is recomputed alone cannot pop twice: let Pipe(checkpoint=...) recompute whole partitions"
    return RuntimeError(f"{command.name!r} has not been stashed when {title} pops it: {mend}")
