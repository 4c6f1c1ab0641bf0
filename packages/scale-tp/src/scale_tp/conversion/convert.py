"""What becomes of each module of a model that is divided: its kind, and how its parameters stand on the ranks.

Arithmetic on names, shapes and styles; nothing is changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from torch import nn

from scale_core.comm.group import Group
from scale_tp.attention_heads import AttentionRule, Heads, heads_of, in_elements
from scale_tp.conversion.modules import Columns, Rows, Width, Words, outputs_dim
from scale_tp.conversion.styles import Style
from scale_tp.layers.base import Placement
from scale_tp.layers.input_region import Entrance
from scale_tp.layers.module_swap import Divided, declared, weight_of
from scale_tp.layers.replicated import SummedGradients, SummedOutput
from scale_tp.random import DividedRandomness
from scale_tp.split import Split


@dataclass(frozen=True)
class Change:
    """What becomes of one module.

    Attributes:
        path: Its name.
        module: The module.
        kind: What is added to its class.
        placements: How its parameters are to stand on the ranks.
        split: How the dimension of its weight that is divided is dealt to the ranks; None where none is.
        gathers: Of `Columns`: whether every rank gets all outputs.
        entrance: Of `Columns`: the way into the divided region, once it is known who takes it together.
        splits_input: Of `Rows`: whether all inputs come, of which each rank takes its own.
        sums: Of `Rows`: whether the summands are added there.
        overlap_pieces: Of `Rows`: into how many pieces the sum is cut to overlap it with the product, or None.
        sequence_parallel: Of `Rows` and `SummedOutput`: whether ranks get their part of the sequence.
        randomness: Of `Columns` and `Rows`: the random numbers between them, where something may be dropped there.
    """

    path: str
    module: nn.Module
    kind: type[Divided]
    placements: dict[str, Placement]
    split: Split | None = None
    gathers: bool = False
    entrance: Entrance | None = None
    splits_input: bool = False
    sums: bool = True
    overlap_pieces: int | None = None
    sequence_parallel: bool = False
    randomness: DividedRandomness | None = None

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
        """Those that the kind declares, beside its parameters and how they stand."""
        names = {field.name for field in fields(self)} & declared(self.kind) - {"placements"}
        return {name: getattr(self, name) for name in names}


def all_heads(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], ranks: Group, rules: tuple[AttentionRule, ...]
) -> dict[str, Heads]:
    """The heads of each attention module, by its name."""
    below: dict[str, dict[str, int]] = {}
    for path, style in styles.items():
        if style.divides == "outputs" and style.output == "part":
            parent, _, name = path.rpartition(".")
            below.setdefault(parent, {})[name] = weight_of(modules[path]).shape[outputs_dim(modules[path])]
    found = {
        parent: heads_of(modules[parent], parent, children, ranks.size, rules) for parent, children in below.items()
    }
    return {parent: heads for parent, heads in found.items() if heads is not None}


def weight_split(path: str, module: nn.Module, style: Style, ranks: Group, heads: Mapping[str, Heads]) -> Split | None:
    """How the dimension that is divided is dealt to the ranks; None where no weight is."""
    if style.divides in ("sequence", "nothing"):
        return None
    parent, _, name = path.rpartition(".")
    if style.divides in ("words", "width"):
        return Split.even(weight_of(module).shape[0 if style.divides == "words" else 1], ranks.size)
    dim = outputs_dim(module)
    total = weight_of(module).shape[dim if style.divides == "outputs" else 1 - dim]
    of = heads.get(parent)
    of_heads = None if of is None or style.output != "part" else of.split_of(name)
    if of_heads is not None:
        return of_heads
    if (
        of is not None
        and style.divides == "inputs"
        and style.input == "part"
        and total == of.split.query.total * of.head_size
    ):
        return in_elements(of.split.query, of.head_size)
    if total % style.stacked:
        raise ValueError(f"'{path}': expected {style.stacked} stacked matrices of one size, got {total} rows in all")
    if style.stacked == 1:
        return Split.even(total, ranks.size)
    return Split.stacked(*[Split.even(total // style.stacked, ranks.size)] * style.stacked)


def change_of(path: str, module: nn.Module, style: Style, split: Split | None, inside: bool) -> Change:
    """What becomes of a module; `inside` of a stretch, each rank has a part of the sequence around it."""
    shapes = {name: tuple(param.shape) for name, param in module.named_parameters(recurse=False)}
    whole = {name: Placement(shape) for name, shape in shapes.items()}
    if split is None:
        if style.sums_gradients:
            return Change(path, module, SummedGradients, whole)
        return Change(path, module, SummedOutput, whole, sequence_parallel=inside)
    if style.divides == "words":
        return Change(path, module, Words, whole | {"weight": Placement(shapes["weight"], 0, split)}, split)
    if style.divides == "width":
        return Change(path, module, Width, whole | {"weight": Placement(shapes["weight"], 1, split)}, split)
    dim = outputs_dim(module)
    if style.divides == "outputs":
        placed = {"weight": Placement(shapes["weight"], dim, split)}
        if "bias" in shapes:
            placed["bias"] = Placement(shapes["bias"], 0, split)
        return Change(path, module, Columns, placed, split, gathers=style.output == "whole")
    return Change(
        path,
        module,
        Rows,
        whole | {"weight": Placement(shapes["weight"], 1 - dim, split)},
        split,
        splits_input=style.input == "whole",
        sums=style.output != "summand",
        sequence_parallel=inside,
    )
