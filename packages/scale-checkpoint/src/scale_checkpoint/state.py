"""Which pass a checkpointed module is in, by thread: queries for layers inside, and the switch of checkpointing.

Another package that recomputes enters `checkpointing` and `recomputing` around it, so that layers inside see the same.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


class _State(threading.local):
    """Of one thread: a backward pass on an accelerator runs in a thread of its own."""

    checkpointing = False
    recompute_depth = 0  # recomputations within one another: a backward in a forward recomputes the part before it
    disabled = False
    internal = False  # this package's own operators run, for example copies that leave


STATE = _State()
"""Read and set by the forward of every checkpointed module, without a call."""


def is_checkpointing() -> bool:
    """Whether this is the first forward of a checkpointed module, whose activations are not kept.

    Examples:
        >>> import torch
        >>> from scale_checkpoint import checkpoint_wrapper, is_checkpointing
        >>> class Layer(torch.nn.Linear):
        ...     def forward(self, x):
        ...         print("checkpointing" if is_checkpointing() else "recomputing")
        ...         return super().forward(x)
        >>> layer = checkpoint_wrapper(Layer(4, 4))
        >>> layer(torch.ones(1, 4)).sum().backward()
        checkpointing
        recomputing

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    return STATE.checkpointing


def is_recomputing() -> bool:
    """Whether a checkpointed module is computed again, in the backward pass.

    Examples:
        >>> import torch
        >>> from scale_checkpoint import checkpoint_wrapper, is_recomputing
        >>> class Counter(torch.nn.Linear):
        ...     calls = 0
        ...     def forward(self, x):
        ...         self.calls += not is_recomputing()  # each batch counts once
        ...         return super().forward(x)
        >>> counter = checkpoint_wrapper(Counter(4, 4))
        >>> counter(torch.ones(1, 4)).sum().backward()
        >>> counter.calls
        1

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    return STATE.recompute_depth > 0


def is_disabled() -> bool:
    """Whether this is inside `disable_checkpointing`."""
    return STATE.disabled


@contextmanager
def _set(**values: bool | int) -> Iterator[None]:
    before = {name: getattr(STATE, name) for name in values}
    vars(STATE).update(values)
    try:
        yield
    finally:
        vars(STATE).update(before)


def disable_checkpointing() -> AbstractContextManager[None]:
    """Inside, modules that are checkpointed or offloaded run as plain ones, and keep all that they save.

    >>> import torch
    >>> from scale_checkpoint import checkpoint_wrapper, disable_checkpointing
    >>> block = checkpoint_wrapper(torch.nn.Linear(2, 2))
    >>> with disable_checkpointing():
    ...     output = block(torch.ones(1, 2))

    See also: [the guide to activation checkpointing](../guides/checkpoint.md).
    """
    return _set(disabled=True)


def checkpointing() -> AbstractContextManager[None]:
    """Around the first forward of a call that will be computed again."""
    return _set(checkpointing=True)


def recomputing() -> AbstractContextManager[None]:
    """Around a recomputation; a call that first runs inside is both checkpointed and recomputed.

    `disable_checkpointing` around a backward comes too late, since the forward was checkpointed.
    """
    return _set(checkpointing=False, recompute_depth=STATE.recompute_depth + 1, disabled=False)


class InternalOps(AbstractContextManager[None]):
    """Around this package's own operators: dispatch modes that follow a module's leave them out."""

    def __enter__(self) -> None:
        self._before, STATE.internal = STATE.internal, True

    def __exit__(self, *_: object) -> None:
        STATE.internal = self._before
