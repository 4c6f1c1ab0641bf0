"""A backward pass in two parts: gradients of the inputs now, gradients of the parameters later (zero bubble).

Autograd's graph of a stage is walked once. Nodes that lead to an input are on the *path*; the others lead to parameters
alone. The *boundary* is where the path has an edge to such a part:

    output  <-  addmm  <-  relu  <-  addmm  <-  input          path
                  |                    |
               transpose            transpose                  parameters alone
                  |                    |
               weight               weight

The first pass runs along the path and keeps the gradients at the boundary. The second one starts there, at each node of
the boundary by itself, and asks for the leaves behind its own edges: the engine then computes nothing else. Each node
gets the very gradients that one pass would have given it, so the sums are the same, to the bit.

Vectors are an exception: some nodes, for example a layer norm, compute the gradients of their parameters on the way,
at hardly any cost. These are taken in the first pass, and added to `grad` in the second.

Some graphs can't be cut, and have one pass: where one parameter is reached from two nodes of the boundary (its two
summands would be added to `param.grad` one after the other), and where a function of Python, which may do anything,
would have to run twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from scale_core import compat

_Edge = tuple[Node, int]

Gradients = Sequence[Tensor | None]
"""One for each root or input; None where there is none."""


class _Segment(NamedTuple):
    """The work of one call of the engine in the second pass."""

    edges: list[GradientEdge]  # where it starts
    leaves: list[Tensor]  # whose gradients it adds to `grad`


class _Cut(NamedTuple):
    """Where a graph is cut."""

    on_path: list[bool]  # for each root, whether it leads to an input
    boundary: list[_Segment]  # segments that start at nodes of the path
    vectors: list[Tensor]  # leaves whose gradients are computed on the way
    beside: _Segment | None  # the one that starts at roots that lead to parameters only


class SplitBackward:
    """The backward pass of one micro-batch through one stage, from its roots to leaves and parameters.

    Roots are edges of the graph, since the memory of outputs need not be kept for this.
    """

    def __init__(self, roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> None:
        self._roots = list(roots)
        self._inputs = list(inputs)
        self._later: list[tuple[_Segment, list[Tensor | None]]] = []

    def run_inputs(self, gradients: Gradients) -> list[Tensor | None] | None:
        """Computes and returns the gradients of the inputs; `gradients` are the gradients of the roots.

        Returns None, and computes nothing, where the graph can't be cut.
        """
        cut = _cut(self._roots, self._inputs)
        if cut is None:
            return None
        roots, self._roots = self._roots, []
        if cut.beside is not None:
            self._later = [(cut.beside, [g for g, on in zip(gradients, cut.on_path, strict=True) if not on])]
        edges, edge_grads = _with_gradient(
            roots, [g if on else None for g, on in zip(gradients, cut.on_path, strict=True)]
        )
        if not edges:
            return [None] * len(self._inputs)
        targets: list[Any] = [*self._inputs, *(edge for part in cut.boundary for edge in part.edges), *cut.vectors]
        grads: list[Tensor | None] = list(
            torch.autograd.grad(edges, targets, edge_grads, retain_graph=bool(cut.boundary), allow_unused=True)
        )
        index = num_inputs = len(self._inputs)
        self._inputs = []  # Their memory is kept only where a gradient of a parameter needs it.
        for part in cut.boundary:
            self._later.append((part, grads[index : index + len(part.edges)]))
            index += len(part.edges)
        if cut.vectors:
            segment = _Segment([get_gradient_edge(leaf) for leaf in cut.vectors], cut.vectors)
            self._later.append((segment, grads[index:]))
        return grads[:num_inputs]

    def run_weights(self) -> None:
        """Adds the gradients of the parameters to their `grad`."""
        later, self._later = self._later, []
        for index, (part, saved_grads) in enumerate(later):
            later[index] = (part, [])  # Used gradients are freed before the next is computed.
            edges, edge_grads = _with_gradient(part.edges, saved_grads)
            del saved_grads
            if edges:
                compat.add_gradients(edges, edge_grads, part.leaves)  # There is a part for nearly each layer.


def _with_gradient(edges: Sequence[GradientEdge], gradients: Gradients) -> tuple[list[GradientEdge], list[Tensor]]:
    pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
    return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


def _cut(roots: Sequence[GradientEdge], inputs: Sequence[Tensor]) -> _Cut | None:
    """Cuts a graph; None where it can't be."""
    next_edges: dict[Node, list[_Edge]] = {}
    previous: dict[Node, list[Node]] = {}
    stack = [root.node for root in roots]
    while stack:
        node = stack.pop()
        if node in next_edges:
            continue
        edges = next_edges[node] = [edge for edge in cast(Any, node).next_functions if edge[0] is not None]
        for other, _ in edges:
            if other in previous:
                previous[other].append(node)
            else:
                previous[other] = [node]
            stack.append(other)
    path = _leading_to([get_gradient_edge(leaf).node for leaf in inputs], previous)
    owners: dict[Node, Node | None] = {}
    boundary: list[_Segment] = []
    vectors: list[Tensor] = []
    for node, edges in next_edges.items():  # In the order of the walk, whatever the memory's addresses are.
        if node not in path:
            continue
        starts = [other for other, _ in edges if other not in path]
        is_python = isinstance(cast(object, node), BackwardCFunction)
        if is_python and (starts or node.name() == "CheckpointFunctionBackward"):
            return None  # The latter computes gradients of parameters itself, and refuses where inputs alone are asked.
        leaves = _claim(starts, node, owners, next_edges) if starts else []
        if leaves is None:
            return None
        if leaves and all(leaf.ndim <= 1 and not leaf._backward_hooks for leaf in leaves):
            vectors += leaves  # Hooks of a leaf would be called in both passes.
        elif leaves:
            outputs = [root.output_nr for root in roots if root.node is node]
            outputs += [nr for other in previous.get(node, ()) for after, nr in next_edges[other] if after is node]
            boundary.append(_Segment([GradientEdge(node, nr) for nr in dict.fromkeys(outputs)], leaves))
    on_path = [root.node in path for root in roots]
    off_path_roots = [root for root, on in zip(roots, on_path, strict=True) if not on]
    if not off_path_roots:
        return _Cut(on_path, boundary, vectors, None)
    leaves = _claim([root.node for root in off_path_roots], None, owners, next_edges)
    return None if leaves is None else _Cut(on_path, boundary, vectors, _Segment(off_path_roots, leaves))


def _leading_to(ends: Sequence[Node], previous: dict[Node, list[Node]]) -> set[Node]:
    """The nodes from which one of the ends can be reached, and the ends."""
    path, stack = set(ends), list(ends)
    while stack:
        for node in previous.get(stack.pop(), ()):
            if node not in path:
                path.add(node)
                stack.append(node)
    return path


def _claim(
    starts: Sequence[Node], owner: Node | None, owners: dict[Node, Node | None], next_edges: dict[Node, list[_Edge]]
) -> list[Tensor] | None:
    """Returns the leaves behind `starts`, which belong to `owner` from now on; None if one belongs to another."""
    leaves: list[Tensor] = []
    stack, seen = list(starts), set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if owners.setdefault(node, owner) is not owner:
            return None
        edges = next_edges[node]
        stack += [other for other, _ in edges]
        if not edges and node.name() == "torch::autograd::AccumulateGrad":
            leaves.append(cast(Any, node).variable)
    return leaves
