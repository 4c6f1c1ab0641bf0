"""The conversion of each module of a divided model: its mixin, and the sharding of its parameters.

Arithmetic on names, shapes and styles; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from scale_core.comm.group import Group
from scale_tp.attention_heads import AttentionRule, Heads, find_heads, heads_to_features
from scale_tp.conversion.modules import (
    ColumnParallelMixin,
    RowParallelMixin,
    VocabParallelMixin,
    WidthParallelMixin,
    is_transposed,
    output_dim,
)
from scale_tp.conversion.styles import Style
from scale_tp.layers.base import ParamSharding
from scale_tp.layers.module_swap import ShardedMixin, weight_of
from scale_tp.layers.replicated import GradAllReduceMixin, OutputAllReduceMixin
from scale_tp.split import Split


class Conversion(NamedTuple):
    """The conversion of one module."""

    path: str
    module: nn.Module
    mixin: type[ShardedMixin]
    shardings: dict[str, ParamSharding]
    attributes: dict[str, Any]  # those that the mixin declares

    @property
    def parent(self) -> str:
        """The name of the module that holds it."""
        return self.path.rpartition(".")[0]


def find_all_heads(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], ranks: Group, rules: tuple[AttentionRule, ...]
) -> dict[str, Heads]:
    """Returns the heads of each attention module whose projections are divided, by its name."""
    below: dict[str, dict[str, int]] = {}
    for path, style in styles.items():
        if style.divides == "outputs" and style.output == "part":
            parent, _, name = path.rpartition(".")
            below.setdefault(parent, {})[name] = weight_of(modules[path]).shape[output_dim(modules[path])]
    heads_by_parent = {
        parent: find_heads(modules[parent], parent, children, ranks.size, rules) for parent, children in below.items()
    }
    return {parent: heads for parent, heads in heads_by_parent.items() if heads is not None}


def weight_split(path: str, module: nn.Module, style: Style, ranks: Group, heads: Mapping[str, Heads]) -> Split | None:
    """Returns how a weight is divided between the ranks; None where it is not."""
    if style.divides in ("sequence", "nothing"):
        return None
    parent, _, name = path.rpartition(".")
    if style.divides in ("words", "width"):
        return Split.even(weight_of(module).shape[0 if style.divides == "words" else 1], ranks.size)
    dim = output_dim(module)
    total = weight_of(module).shape[dim if style.divides == "outputs" else 1 - dim]
    attention = heads.get(parent)
    if (
        attention is not None
        and style.output == "part"
        and (projection_split := attention.projection_split(name)) is not None
    ):
        return projection_split
    takes_heads = style.divides == "inputs" and style.input == "part"
    if attention is not None and takes_heads and total == attention.split.query.total * attention.head_size:
        return heads_to_features(attention.split.query, attention.head_size)
    if total % style.stacked:
        raise ValueError(f"'{path}': expected {style.stacked} stacked matrices of one size, got {total} rows in all")
    return Split.strided(total, ranks.size, style.stacked)


def conversion_for(path: str, module: nn.Module, style: Style, split: Split | None, in_region: bool) -> Conversion:
    """Returns the conversion of a module; with `in_region` each rank has a part of the sequence around it."""
    shardings = {name: ParamSharding(tuple(param.shape)) for name, param in module.named_parameters(recurse=False)}
    if split is None:
        if style.sums_gradients:
            return Conversion(path, module, GradAllReduceMixin, shardings, {})
        return Conversion(path, module, OutputAllReduceMixin, shardings, {"sequence_parallel": in_region})
    if style.divides in ("words", "width"):
        mixin, dim = (VocabParallelMixin, 0) if style.divides == "words" else (WidthParallelMixin, 1)
        sharded = {"weight": shardings["weight"]._replace(dim=dim, split=split)}
        return Conversion(path, module, mixin, shardings | sharded, {"path": path})
    dim, attributes = output_dim(module), {"path": path, "transposed": is_transposed(module)}
    if style.divides == "outputs":
        sharded = {"weight": shardings["weight"]._replace(dim=dim, split=split)}
        if "bias" in shardings:
            sharded["bias"] = shardings["bias"]._replace(split=split)
        attributes |= {"gather_output": style.output == "whole"}
        return Conversion(path, module, ColumnParallelMixin, sharded, attributes)
    sharded = {"weight": shardings["weight"]._replace(dim=1 - dim, split=split)}
    attributes |= {"split_input": style.input == "whole", "reduce_output": style.output != "summand"}
    return Conversion(
        path, module, RowParallelMixin, shardings | sharded, attributes | {"sequence_parallel": in_region}
    )
