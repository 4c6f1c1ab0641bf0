"""Which pass a checkpointed module is in: what code inside of one may ask, and what switches checkpointing off.

There is one answer for the whole house: whoever recomputes in another way enters `checkpointing` and `recomputing`
around it, so that layers inside see the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class _Phase(threading.local):
    """Of one thread: a backward pass on an accelerator runs in a thread of its own."""

    checkpointing = False
    recomputing = 0  # How many recomputations run inside of one another.
    disabled = False
    aside = False


_phase = _Phase()


def is_checkpointing() -> bool:
    """Whether this is the first forward of a checkpointed module, whose activations are not kept."""
    return _phase.checkpointing


def is_recomputing() -> bool:
    """Whether a checkpointed module is computed again, in the backward pass."""
    return _phase.recomputing > 0


def recomputations() -> int:
    """How many recomputations run inside of one another; a backward in a forward recomputes what came before it."""
    return _phase.recomputing


def is_disabled() -> bool:
    """Whether this is inside `disable_checkpointing`."""
    return _phase.disabled


def is_aside() -> bool:
    """Whether what runs now is this package's own work, as a copy that leaves, and not the module's."""
    return _phase.aside


class Aside(AbstractContextManager[None]):
    """Around this package's own operators: who follows a module's leaves them out, since they come when they like."""

    def __enter__(self) -> None:
        self._before, _phase.aside = _phase.aside, True

    def __exit__(self, *_: object) -> None:
        _phase.aside = self._before


@contextmanager
def disable_checkpointing() -> Iterator[None]:
    """Inside, modules that are checkpointed or offloaded run as plain ones, and keep all that they save.

    >>> import torch
    >>> from scale_checkpoint import checkpoint_wrapper, disable_checkpointing
    >>> block = checkpoint_wrapper(torch.nn.Linear(2, 2))
    >>> with disable_checkpointing():
    ...     output = block(torch.ones(1, 2))
    """
    before, _phase.disabled = _phase.disabled, True
    try:
        yield
    finally:
        _phase.disabled = before


class _Entered(AbstractContextManager[None]):
    """Sets the answers, and sets them back; a class, since it is entered on the way of every module's forward."""

    def __init__(self, recomputing: bool) -> None:
        self._recomputing = recomputing

    def __enter__(self) -> None:
        self._before = _phase.checkpointing, _phase.recomputing, _phase.disabled
        # What is first run inside of a recomputation is both.
        _phase.checkpointing = not self._recomputing
        _phase.recomputing += self._recomputing
        if self._recomputing:  # Whoever disables a backward comes too late: the forward was checkpointed.
            _phase.disabled = False

    def __exit__(self, *_: object) -> None:
        _phase.checkpointing, _phase.recomputing, _phase.disabled = self._before


def checkpointing() -> AbstractContextManager[None]:
    """Around the first forward of what will be computed again."""
    return _Entered(recomputing=False)


def recomputing() -> AbstractContextManager[None]:
    """Around what is computed again."""
    return _Entered(recomputing=True)
