"""Where a tensor comes into the divided region or out of it, as autograd remembers it.

Each crossing is a function of autograd, of one of two kinds, that knows its ranks. So of any tensor it can be told
between which ranks the layers are divided that it was computed by.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from scale_core.autograd_hooks import in_backward
from scale_core.comm.group import Group
from scale_core.compat import untraced


class Entering(torch.autograd.Function):
    """What brings a tensor into the divided region; its context has the attribute `ranks`.

    Where each rank gets a part of a dimension, it has what `divides` records as well.
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


def divides(context: Any, part: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
    """Records in a crossing's context what it gives: this rank's part; and returns the part.

    Args:
        context: Of the crossing.
        part: [..., n of this rank, ...].
        dim: The dimension that is divided; negative counts from the last.
        sizes: n of each rank.
    """
    context.parts, context.parts_of = tuple(sizes), _beside(part, dim)
    return part


def division_of(part: Tensor, group: Group, dim: int) -> tuple[int, ...] | None:
    """Returns how much each rank has of what a part was computed from, position by position, as far as autograd knows.

    The answer is the same on all ranks that compute alike: it depends on the functions that were called, and on no
    length that is one rank's own. So only such functions are followed as give each position of their result from the
    same position of an input, or from all of them: a slice, a mean, or what is not known may have any length.

    Args:
        part: [..., n of this rank, ...].
        group: The ranks.
        dim: The dimension that is divided.

    Returns:
        n of each rank, by rank, which the part has if nobody has stretched it; None where autograd does not know.
    """
    here = _beside(part, dim)
    of_features = here[0] == part.dim() - 1  # These are others after a product.
    seen: set[Any] = set()
    waiting: deque[Any] = deque([part.grad_fn])
    while waiting:  # The nearest will do.
        node = waiting.popleft()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not issubclass(getattr(node, "_forward_cls", object), (Entering, Leaving)):
            waiting += _position_by_position(node, of_features)
        elif node.ranks.ranks == group.ranks and getattr(node, "parts_of", None) == here:
            parts: tuple[int, ...] = node.parts
            return parts
    return None


def is_elementwise(node: Any) -> bool:
    """Whether a function of autograd computes each element of its result from one of each input."""
    return _kind_of(node) in _ELEMENTWISE


_IDENTITY = "_IdentityBackward"
"""What scale-core puts behind a module whose gradients it waits for."""

# As autograd calls them, without "Backward" and the number.
_ELEMENTWISE = frozenset(
    [
        "Abs", "Add", "Addcdiv", "Addcmul", "Clamp", "ClampMax", "ClampMin", "Clone", "Cos", "Div", "Elu", "Erf",
        "Exp", "Expm1", "Gelu", "Hardsigmoid", "Hardswish", "Hardtanh", "LeakyRelu", "Lerp", "Log", "Log1P",
        "LogSigmoid", "Logaddexp", "MaskedFill", "Maximum", "Minimum", "Mish", "Mul", "NanToNum", "NativeDropout",
        "Neg", "Pow", "Reciprocal", "Relu", "Rsqrt", "Rsub", "Sigmoid", "Silu", "Sin", "Softplus", "Sqrt", "Sub",
        "Tanh", "Threshold", "ToCopy", "Where", "_Identity",
    ]
)  # fmt: skip
_BY_ROWS = frozenset(["FusedRmsNorm", "LogSoftmax", "NativeLayerNorm", "SafeSoftmax", "Softmax"])
_PRODUCTS = {"Mm": 0, "Bmm": 0, "Addmm": 1, "Linear": 0}
"""Products of matrices, and which input it is whose rows the result has."""


def _position_by_position(node: Any, of_features: bool) -> Iterator[Any]:
    """The functions before one, as far as its result has their positions: rows, or features."""
    before, kind = [function for function, _ in node.next_functions], _kind_of(node)
    if kind in _ELEMENTWISE or kind in _BY_ROWS or (kind in ("View", "UnsafeView") and _keeps_features(node)):
        yield from before
    elif kind in _PRODUCTS and not of_features:
        yield before[_PRODUCTS[kind]]


def _kind_of(node: Any) -> str:
    """What torch calls a function of its own, all of which have a number, or our identity; "" for any other."""
    name: str = node.name()
    return name.rstrip("0123456789").removesuffix("Backward") if name[-1].isdigit() or name == _IDENTITY else ""


def _keeps_features(view: Any) -> bool:
    """Whether a view is of as many features, so that it only counts the positions in another way."""
    before, after = tuple(view._saved_self_sym_sizes), tuple(view._input_metadata[0].shape)
    return bool(before and after and before[-1] == after[-1])


def _beside(part: Tensor, dim: int) -> tuple[int, ...]:
    """Which dimension is divided, and the sizes of the others but the features: what all ranks see alike."""
    dim = dim % part.dim()
    return dim, *(size for each, size in enumerate(part.shape[:-1]) if each != dim)
