"""Where a tensor comes into the divided region or out of it, as autograd remembers it.

Each crossing is a function of autograd, of one of two kinds, that knows its ranks. So of any tensor it can be told
between which ranks the layers are divided that it was computed by.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scale_core.compat import untraced
from scale_core.group import Group


class Entering(torch.autograd.Function):
    """What brings a tensor into the divided region; its context has the attribute `ranks`."""


class Leaving(torch.autograd.Function):
    """What brings a tensor out of the divided region; its context has the attribute `ranks`."""


@untraced  # What torch.compile compiles goes on without a graph here.
def cross(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Applies a function of autograd."""
    return function.apply(*args)


def entered_with(tensor: Tensor) -> list[Group]:
    """Returns the ranks of the regions that a tensor was computed in, as far as autograd knows: mostly one group.

    From the tensor back, up to where what it was computed from came into a region, or out of one.
    """
    found: dict[Group, None] = {}
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(node, "_forward_cls", object)
        if issubclass(function, Entering):
            found[node.ranks] = None
        elif not issubclass(function, Leaving):
            waiting += [before for before, _ in node.next_functions]
    return list(found)
