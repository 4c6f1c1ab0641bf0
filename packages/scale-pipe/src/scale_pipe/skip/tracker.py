"""The skip tracker: runs skippable layers, and keeps their stashed tensors until they are popped.

Inside of `run_with_skips` popped tensors are passed in and stashed ones are returned; outside, a tracker of the thread
keeps them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from scale_checkpoint import is_recomputing
from scale_pipe.skip.namespace import DeclaredSkips, SkipKey, pop, skip_key, stash

R = TypeVar("R")


class SkipTracker:
    """The tensors that are stashed and not popped yet, by key; the tracker of a thread outlives single calls."""

    def __init__(self, popped: Mapping[SkipKey, Any] = MappingProxyType({}), *, of_thread: bool = False) -> None:
        self.tensors, self.stashed, self.of_thread = dict(popped), set[SkipKey](), of_thread

    def stash(self, key: SkipKey, value: Any) -> None:
        if self.of_thread and is_recomputing():
            return  # It was popped in the forward, and is not popped again.
        self.tensors[key] = value
        self.stashed.add(key)

    def pop(self, key: SkipKey) -> Any:
        self.stashed.discard(key)
        return self.tensors.pop(key)


class _Current(threading.local):
    """The tracker of this thread: recomputation on an accelerator runs in a thread of its own."""

    def __init__(self) -> None:
        self.tracker = SkipTracker({}, of_thread=True)


_current = _Current()


def current_skip_tracker() -> SkipTracker:
    """Returns the tracker that skippable layers of this thread use."""
    return _current.tracker


@contextmanager
def use_skip_tracker(tracker: SkipTracker) -> Iterator[SkipTracker]:
    """Inside, skippable layers of this thread use a tracker."""
    before, _current.tracker = _current.tracker, tracker
    try:
        yield tracker
    finally:
        _current.tracker = before


def run_with_skips(
    partition: Callable[..., R], popped: Mapping[SkipKey, Any], *args: Any, **kwargs: Any
) -> tuple[R, dict[SkipKey, Any]]:
    """Calls a partition with the skips that it pops; returns its output, and the skips it has stashed for others.

    Nothing is kept from one call to the next, so it can be recomputed as any function of tensors.
    """
    with use_skip_tracker(SkipTracker(popped)) as tracker:
        output = partition(*args, **kwargs)
    return output, {key: value for key, value in tracker.tensors.items() if key in tracker.stashed}


def run_generator(module: nn.Module, declared: DeclaredSkips, layer: Generator[Any, Any, Any]) -> Any:
    """Runs a skippable layer's generator and its commands; errors are raised at its own `yield`."""
    tracker = _current.tracker
    to_stash, to_pop = set(declared.stash), set(declared.pop)
    try:
        command = next(layer)
        while True:
            error, answer = _command_error(command, declared, tracker, module), None
            if error is not None:
                command = layer.throw(error)
                continue
            if isinstance(command, stash):
                tracker.stash(skip_key(module, command.name), command.tensor)
                to_stash.discard(command.name)
            else:
                answer = tracker.pop(skip_key(module, command.name))
                to_pop.discard(command.name)
            del command  # It holds the tensor.
            command = layer.send(answer)
    except StopIteration as end:
        output = end.value
    check_all_used(module, to_stash, to_pop)
    return output


def check_all_used(module: nn.Module, to_stash: set[str], to_pop: set[str]) -> None:
    """Raises `RuntimeError` if a forward has left out some of the skips that its class declares."""
    for names, did, verb in ((to_stash, "stashed", "stash"), (to_pop, "popped", "pop")):
        if names:
            raise RuntimeError(
                f"{', '.join(map(repr, sorted(names)))} must be {did} but have not: a {type(module).__name__} declares "
                f"what each of its forwards does; let it yield {verb}(...), or leave it out of @skippable"
            )


def _command_error(command: Any, declared: DeclaredSkips, tracker: SkipTracker, module: nn.Module) -> Exception | None:
    title = type(module).__name__
    for kind, names, able in ((stash, declared.stash, "stashable"), (pop, declared.pop, "poppable")):
        if isinstance(command, kind) and command.name not in names:
            return RuntimeError(
                f"{command.name!r} has not been declared as {able} by {title}: write "
                f"@skippable({kind.__name__}={[*names, command.name]})"
            )
    if not isinstance(command, stash | pop):
        return TypeError(f"{command!r} is not a command: a skippable {title} yields stash(name, tensor) or pop(name)")
    if isinstance(command, stash) or skip_key(module, command.name) in tracker.tensors:
        return None
    hint = "let a layer before it stash it; verify_skippables(module) says which pairs do not match"
    if is_recomputing():
        hint = "a layer that is recomputed alone cannot pop twice: let Pipe(checkpoint=...) recompute whole partitions"
    return RuntimeError(f"{command.name!r} has not been stashed when {title} pops it: {hint}")
