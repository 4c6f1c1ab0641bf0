"""The number of elements that a loss is a mean over, read from autograd's graph without a change of the loss function.

Only nodes of one element are visited, from the loss back to where elements are averaged. For example, the loss
`cross_entropy(logits, target, ignore_index=0) / 4` has two nodes: the division, whose factor is 1/4, and the cross
entropy, which is a mean over the targets that are not 0. Nothing is computed but the number of such targets.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

_DEEPEST = 200  # nodes between a loss and a mean
_MEAN = 1  # torch's number for reduction="mean"
_CROSS_ENTROPY = ("NllLossBackward0", "NllLoss2DBackward0")

Scalar = float | Tensor
"""A number, or a tensor of one element that is not waited for."""

_FACTORS: Mapping[str, Callable[[Any], Sequence[Scalar | None]]] = {
    "AddBackward0": lambda node: (1.0, node._saved_alpha),
    "SubBackward0": lambda node: (1.0, -node._saved_alpha),
    "MulBackward0": lambda node: (node._saved_other, node._saved_self),
    "MulBackward1": lambda node: (node._saved_other,),
    "DivBackward0": lambda node: (1 / _divisor(node),),
    "DivBackward1": lambda node: (1 / node._saved_other,),
    "NegBackward0": lambda node: (-1.0,),
    "WhereBackward0": lambda node: (node._saved_condition, ~node._saved_condition),
    "NanToNumBackward0": lambda node: (node._saved_self.isfinite(),),
}
"""The derivatives of a node's output by its inputs."""

_IDENTITIES = frozenset(
    f"{name}Backward{number}"
    for name in ("View", "UnsafeView", "Squeeze", "Unsqueeze", "Expand", "Clone", "ToCopy", "Alias", "Sum", "Mean")
    for number in range(3)
)
"""Nodes whose output equals their input if that has one element."""


class CrossEntropy(NamedTuple):
    """A mean over the targets that count."""

    target: Tensor  # [N] or [N, d1, d2], int64
    ignore_index: int
    class_weights: Tensor | None  # [C]

    def num_counted(self, target: Tensor) -> Tensor:
        """Returns how many targets count, or the sum of the weights of their classes."""
        counts = target != self.ignore_index
        if self.class_weights is None:
            return counts.sum()
        return self.class_weights.double()[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()


class ElementMean(NamedTuple):
    """A term of a loss: a factor times a mean over elements."""

    factor: Scalar
    num_elements: Scalar
    cross_entropy: CrossEntropy | None = None  # None is a mean of another kind.


@torch.no_grad()
def element_means(loss: Tensor) -> list[ElementMean]:
    """Returns the means over elements in a loss of one element, as far as its graph shows them."""
    return [] if loss.grad_fn is None else list(_means(loss.grad_fn, 1.0, 0))


def _means(node: Any, factor: Scalar, depth: int) -> Iterator[ElementMean]:
    """Yields the means that lead to a node, each with its derivative by the mean times `factor`."""
    name = node.name()
    if name in _CROSS_ENTROPY and node._saved_reduction == _MEAN:
        cross_entropy = CrossEntropy(node._saved_target, _signed(node._saved_ignore_index), node._saved_weight)
        yield ElementMean(factor, cross_entropy.num_counted(cross_entropy.target), cross_entropy)
        return
    source, index = node.next_functions[0] if node.next_functions else (None, 0)
    if name.startswith("MeanBackward") or getattr(node, "_saved_reduction", None) == _MEAN:
        num_elements = 1 if source is None else _num_elements(source, index)
        if num_elements != 1:
            yield ElementMean(factor, num_elements)
            return
    is_mean = name == "DivBackward0" and node.next_functions[1][0] is None
    if depth < _DEEPEST:
        for (source, index), derivative in zip(node.next_functions, _derivatives(node), strict=False):
            if source is not None and derivative is not None and _num_elements(source, index) == 1:
                for mean in _means(source, factor * derivative, depth + 1):
                    is_mean = False
                    yield mean
    if is_mean:  # A sum over a mask, divided by the sum of the mask.
        yield ElementMean(factor, _divisor(node))


def _derivatives(node: Any) -> Sequence[Scalar | None]:
    name = node.name()
    if name in _FACTORS:
        return _FACTORS[name](node)
    passes = name in _IDENTITIES or isinstance(node, BackwardCFunction)  # Such functions only register hooks.
    return [1.0] * len(node.next_functions) if passes else ()


def _divisor(node: Any) -> Tensor:
    """Returns the divisor of a loss; the product keeps it a tensor under a dispatch mode, as in a simulation."""
    divisor: Tensor = torch.ones((), dtype=torch.float64) * node._saved_other
    return divisor


def _signed(number: int) -> int:
    """Returns a number of 64 bits, which torch's nodes give without its sign."""
    return number - (1 << 64) if number >= 1 << 63 else number


def _num_elements(node: Any, index: int) -> int:
    """Returns how many elements an output has whose gradient the node takes."""
    return math.prod(node._input_metadata[index].shape)
