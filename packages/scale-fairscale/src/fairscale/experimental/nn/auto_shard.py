"""`shard_model`: cuts the traced graph of a model into modules that run one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx, nn


def shard_model(model: nn.Module, shard_count: int = 3) -> list[fx.GraphModule]:
    """Cuts a model that `torch.fx` can trace into shards of about equally many parameters.

    Each gets the one value that the one before has returned, and the first one the model's inputs. So a model is cut
    where nothing but one value is needed later, and in fewer shards where there are fewer such places. Modules that
    cannot be traced are not cut.

        >>> import torch
        >>> from fairscale.experimental.nn.auto_shard import shard_model
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(4)))
        >>> first, second = shard_model(model, shard_count=2)
        >>> torch.equal(second(first(torch.ones(1, 2))), model(torch.ones(1, 2)))
        True

    In new code: `scale_pipe.split_module`, or `nn.Sequential` of the parts.

    Args:
        model: The model; its modules are used, not copied.
        shard_count: At most how many shards.

    Raises:
        torch.fx.proxy.TraceError: The control flow of the model itself depends on values.
    """
    traced = _trace(model)
    nodes = [node for node in traced.graph.nodes if node.op != "output"]
    (output,) = (node for node in traced.graph.nodes if node.op == "output")
    parts = _divide(nodes, [_num_params(traced, node) for node in nodes], shard_count)
    shards = []
    passed_on: fx.Node | None = None
    for part in parts:
        shards.append(_shard_of(traced, part, passed_on, output if part is parts[-1] else None))
        passed_on = part[-1]
    return shards


class _Tracer(fx.Tracer):
    """Takes the modules `whole` as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: set[nn.Module] = set()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.whole or super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.GraphModule:
    """Traces a model, with modules that cannot be traced as one node each, the innermost ones."""
    tracer = _Tracer()
    inner_first = reversed([module for module in model.modules() if module is not model])
    for module in inner_first:
        if not tracer.is_leaf_module(module, ""):
            try:
                tracer.trace(module)
            except (TypeError, NotImplementedError, fx.proxy.TraceError):
                tracer.whole.add(module)
    return fx.GraphModule(model, tracer.trace(model))


def _num_params(traced: fx.GraphModule, node: fx.Node) -> int:
    if node.op == "call_module":
        return sum(param.numel() for param in traced.get_submodule(str(node.target)).parameters())
    if node.op == "get_attr":
        module: Any = traced
        for name in str(node.target).split("."):
            module = getattr(module, name)
        return int(module.numel()) if isinstance(module, nn.Parameter) else 0
    return 0


def _divide(nodes: Sequence[fx.Node], sizes: Sequence[int], count: int) -> list[list[fx.Node]]:
    """Neighboring nodes in parts of about equally many parameters; nothing but the last node of each is needed later.

    Args:
        nodes: All but the output.
        sizes: The parameters of each.
        count: At most how many parts.
    """
    position = {node: number for number, node in enumerate(nodes)}
    last_use = [max((position.get(user, len(nodes)) for user in node.users), default=0) for node in nodes]
    parts: list[list[fx.Node]] = [[]]
    filled, needed_until, target = 0, 0, sum(sizes) / count
    for number, (node, size) in enumerate(zip(nodes, sizes, strict=True)):
        may_cut = bool(parts[-1]) and needed_until < number  # Of all but the last node so far.
        if size and may_cut and filled >= target * len(parts) and len(parts) < count:
            parts.append([])
        parts[-1].append(node)
        filled += size
        if number:
            needed_until = max(needed_until, last_use[number - 1])
    return parts


def _shard_of(
    traced: fx.GraphModule, part: Sequence[fx.Node], passed_on: fx.Node | None, output: fx.Node | None
) -> fx.GraphModule:
    """One shard: takes what the one before passes on, and returns what its last node makes, or the model's output."""
    graph = fx.Graph()
    env = {} if passed_on is None else {passed_on: graph.placeholder(passed_on.name)}
    for node in part:
        env[node] = graph.node_copy(node, lambda each: env[each])
    returned: Any = part[-1] if output is None else output.args[0]
    graph.output(fx.map_arg(returned, lambda each: env[each]))
    return fx.GraphModule(traced, graph)


__all__ = ["shard_model"]
