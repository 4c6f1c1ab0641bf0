"""`shard_model`: cuts the traced graph of a model into modules that run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn


def shard_model(model: nn.Module, shard_count: int = 3) -> list[fx.GraphModule]:
    """Cuts a model that `torch.fx` can trace into shards of about equally many parameters.

    Each gets what the one before has returned, and passes on what is needed later.

        >>> import torch
        >>> from fairscale.experimental.nn.auto_shard import shard_model
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
        >>> first, second = shard_model(model, shard_count=2)
        >>> torch.equal(second(first(torch.ones(1, 2))), model(torch.ones(1, 2)))
        True

    In new code: `scale_pipe.split_module`, or `nn.Sequential` of the parts.

    Args:
        model: The model; its modules are used, not copied.
        shard_count: How many shards; fewer where it has fewer layers.

    Raises:
        torch.fx.proxy.TraceError: Its control flow depends on values.
    """
    traced = fx.symbolic_trace(model)
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    parts = _divide(nodes, [_num_params(traced, node) for node in nodes], shard_count)
    shards, live = [], inputs
    for number, part in enumerate(parts):
        later = [node for following in parts[number + 1 :] for node in following]
        shard, live = _shard_of(traced, part, live, later, output)
        shards.append(shard)
    return shards


def _num_params(traced: fx.GraphModule, node: fx.Node) -> int:
    if node.op == "call_module":
        return sum(param.numel() for param in traced.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        found: Any = traced
        for name in str(node.target).split("."):
            found = getattr(found, name)
        return int(found.numel()) if isinstance(found, torch.Tensor) else 0
    return 0


def _divide(nodes: Sequence[fx.Node], sizes: Sequence[int], count: int) -> list[list[fx.Node]]:
    """Neighboring nodes in parts of about equally many parameters."""
    parts: list[list[fx.Node]] = [[]]
    filled, target = 0, sum(sizes) / count
    for node, size in zip(nodes, sizes, strict=True):
        if size and parts[-1] and filled >= target * len(parts) and len(parts) < count:
            parts.append([])
        parts[-1].append(node)
        filled += size
    return parts


def _shard_of(
    traced: fx.GraphModule, part: Sequence[fx.Node], live: Sequence[fx.Node], later: Sequence[fx.Node], output: fx.Node
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """One shard, and the nodes whose values it passes on."""
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in live}
    for node in part:
        known[node] = graph.node_copy(node, lambda each: known[each])
    if not later:
        graph.output(fx.map_arg(output.args[0], lambda each: known[each]))
        return fx.GraphModule(traced, graph), []
    needed = {each for node in (*later, output) for each in node.all_input_nodes}
    passed = [node for node in known if node in needed]
    values = tuple(known[node] for node in passed)
    graph.output(values if len(values) != 1 else values[0])
    return fx.GraphModule(traced, graph), passed


__all__ = ["shard_model"]
