"""The mode that each part of a module was in, `train()` or `eval()`: a recomputation runs in the forward's.

Between a forward and its backward a model may be set to the other one, to be evaluated; the plain module's gradients
don't know of that, since its forward is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import nn

Mode = tuple[nn.Module, bool]
"""A module, and whether it is in training."""


def modes_of(parts: Iterable[nn.Module]) -> list[Mode]:
    """Returns the mode of each part.

    Args:
        parts: The module and all that it holds.
    """
    return [(part, part.training) for part in parts]


def changed_since(modes: Iterable[Mode]) -> list[Mode]:
    """Returns those that are in the other mode by now.

    Args:
        modes: Of `modes_of`.
    """
    return [(part, training) for part, training in modes if part.training is not training]


@contextmanager
def restored(modes: Sequence[Mode]) -> Iterator[None]:
    """Inside, the parts are in these modes; afterwards in the other ones.

    Args:
        modes: Of `changed_since`.
    """
    try:
        for part, training in modes:
            part.training = training
        yield
    finally:
        for part, training in modes:
            part.training = not training
