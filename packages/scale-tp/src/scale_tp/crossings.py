"""Where a tensor comes into the divided region or out of it, as autograd remembers it.

Each crossing is a function of autograd, of one of two kinds, that knows its ranks. So of any tensor it can be told
between which ranks the layers are divided that it was computed by.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from scale_core.backward import in_backward
from scale_core.compat import untraced
from scale_core.group import Group


class Entering(torch.autograd.Function):
    """What brings a tensor into the divided region; its context has the attribute `ranks`.

    Where each rank gets a part of a dimension, it has `parts` as well: how much each rank has.
    """


class Leaving(torch.autograd.Function):
    """What brings a tensor out of the divided region; its context has the same attributes."""


@untraced  # What torch.compile compiles goes on without a graph here.
def cross(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Applies a function of autograd."""
    return function.apply(*args)


@untraced
def check_inside(what: str, tensor: Tensor, group: Group) -> None:
    """Refuses a tensor whose gradient would not be summed: one that has never been brought into the divided region.

    A tensor that needs no gradient may be anything. So may one that has no history where a checkpoint computes again.

    Args:
        what: What it is given to, in an error.
        tensor: What is said to be inside.
        group: The ranks of the region.

    Raises:
        ValueError: It is not.
    """
    if group.size == 1 or not (torch.is_grad_enabled() and tensor.requires_grad):
        return
    if (tensor.grad_fn is None and in_backward()) or any(ranks.ranks == group.ranks for ranks in entered_with(tensor)):
        return
    raise ValueError(
        f"{what}: input_is_inside=True, but the input {list(tensor.shape)} has not been brought into the region of the "
        f"ranks {list(group.ranks)}, so its gradient would be that of this rank's part alone: pass "
        "scale_tp.copy_to_model_parallel_region(input, group), or leave input_is_inside out"
    )


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


def was_divided(tensor: Tensor, group: Group, own: int) -> bool:
    """Whether a tensor was computed from a part that these ranks have divided, of which this rank has `own` elements.

    As far as autograd knows. The search begins at the tensor, and the first that is found will do.
    """
    seen: set[Any] = set()
    waiting: deque[Any] = deque([tensor.grad_fn])
    while waiting:
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not issubclass(getattr(node, "_forward_cls", object), (Entering, Leaving)):
            waiting += [before for before, _ in node.next_functions]
        elif node.ranks.ranks == group.ranks and hasattr(node, "parts") and node.parts[group.rank] == own:
            return True
    return False
