"""What becomes of each module of a model that is divided: its mixin, and how its parameters are sharded.

Arithmetic on names, shapes and styles; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

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
from scale_tp.layers.linear_ops import SharedInput
from scale_tp.layers.module_swap import ShardedMixin, declared_attributes, weight_of
from scale_tp.layers.replicated import GradAllReduceMixin, OutputAllReduceMixin
from scale_tp.random import RegionRNG
from scale_tp.split import Split


@dataclass(frozen=True)
class Conversion:
    """What becomes of one module; the fields below `split` are attributes of the mixins that declare them."""

    path: str
    module: nn.Module
    mixin: type[ShardedMixin]
    shardings: dict[str, ParamSharding]
    split: Split | None = None  # of the weight; None where it is not divided
    gather_output: bool = False  # every rank gets all outputs
    shared_input: SharedInput | None = None  # the same one for modules that read one input
    split_input: bool = False  # the input is whole, and each rank takes its part
    reduce_output: bool = True
    overlap_pieces: int | None = None
    sequence_parallel: bool = False  # ranks get their part of the sequence
    region_rng: RegionRNG | None = None  # where something may be dropped between column and row parallel layers
    transposed: bool = False

    @property
    def parent(self) -> str:
        """The name of the module that holds it."""
        return self.path.rpartition(".")[0]

    @property
    def weight_split(self) -> Split:
        """How the weight is divided, where it is."""
        assert self.split is not None
        return self.split

    def attributes(self) -> dict[str, object]:
        """The attributes that the mixin declares, beside its shardings."""
        names = {field.name for field in fields(self)} & declared_attributes(self.mixin) - {"shardings"}
        return {name: getattr(self, name) for name in names}


def find_all_heads(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], ranks: Group, rules: tuple[AttentionRule, ...]
) -> dict[str, Heads]:
    """Returns the heads of each attention module whose projections are divided, by its name."""
    below: dict[str, dict[str, int]] = {}
    for path, style in styles.items():
        if style.divides == "outputs" and style.output == "part":
            parent, _, name = path.rpartition(".")
            below.setdefault(parent, {})[name] = weight_of(modules[path]).shape[output_dim(modules[path])]
    found = {
        parent: find_heads(modules[parent], parent, children, ranks.size, rules) for parent, children in below.items()
    }
    return {parent: heads for parent, heads in found.items() if heads is not None}


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
    if attention is not None and style.output == "part" and (known := attention.projection_split(name)) is not None:
        return known
    takes_heads = style.divides == "inputs" and style.input == "part"
    if attention is not None and takes_heads and total == attention.split.query.total * attention.head_size:
        return heads_to_features(attention.split.query, attention.head_size)
    if total % style.stacked:
        raise ValueError(f"'{path}': expected {style.stacked} stacked matrices of one size, got {total} rows in all")
    if style.stacked == 1:
        return Split.even(total, ranks.size)
    return Split.stacked(*[Split.even(total // style.stacked, ranks.size)] * style.stacked)


def conversion_for(path: str, module: nn.Module, style: Style, split: Split | None, in_region: bool) -> Conversion:
    """Returns what becomes of a module; `in_region` each rank has a part of the sequence around it."""
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters(recurse=False)}
    replicated = {name: ParamSharding(shape) for name, shape in shapes.items()}
    if split is None:
        if style.sums_gradients:
            return Conversion(path, module, GradAllReduceMixin, replicated)
        return Conversion(path, module, OutputAllReduceMixin, replicated, sequence_parallel=in_region)
    if style.divides in ("words", "width"):
        mixin: type[ShardedMixin] = VocabParallelMixin if style.divides == "words" else WidthParallelMixin
        sharding = ParamSharding(shapes["weight"], 0 if style.divides == "words" else 1, split)
        return Conversion(path, module, mixin, replicated | {"weight": sharding}, split)
    dim, transposed = output_dim(module), is_transposed(module)
    if style.divides == "outputs":
        sharded = {"weight": ParamSharding(shapes["weight"], dim, split)}
        if "bias" in shapes:
            sharded["bias"] = ParamSharding(shapes["bias"], 0, split)
        gathers = style.output == "whole"
        return Conversion(
            path, module, ColumnParallelMixin, sharded, split, gather_output=gathers, transposed=transposed
        )
    return Conversion(
        path,
        module,
        RowParallelMixin,
        replicated | {"weight": ParamSharding(shapes["weight"], 1 - dim, split)},
        split,
        split_input=style.input == "whole",
        reduce_output=style.output != "summand",
        sequence_parallel=in_region,
        transposed=transposed,
    )
