"""Divides a model that exists already between ranks, by a plan of names and styles.

Everything is looked at before anything is changed: which module has which style, where the heads of attention are cut,
whether one layer hands the next what that expects, and whether all ranks are about to do the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from scale_core.comm.collectives import broadcast
from scale_core.comm.group import Group, GroupLike
from scale_core.optim.step_checks import mark_replaced
from scale_core.shard import mark, shard_of
from scale_tp.attention_heads import ATTENTION_RULES, AttentionRule, Heads
from scale_tp.comm import agree
from scale_tp.conversion.convert import Change, all_heads, change_of, weight_split
from scale_tp.conversion.modules import Columns
from scale_tp.conversion.replica_check import watch_first_forward
from scale_tp.conversion.sequence_region import Stretch, divide_stretch, stretch_of
from scale_tp.conversion.styles import Plan, Style, check_carried, resolve
from scale_tp.conversion.validation import (
    check_adapters,
    check_beside,
    check_divisible,
    check_groups,
    check_key_values,
    check_kinds,
    check_layers_divided,
    check_neighbours,
    check_sequences,
    check_summands,
    check_sums,
    check_ties,
)
from scale_tp.layers.base import Placement
from scale_tp.layers.input_region import Entrance
from scale_tp.layers.linear_ops import check_overlap
from scale_tp.layers.module_swap import divide, part_of
from scale_tp.parallel_state import layer_group
from scale_tp.random import DividedRandomness


def parallelize(
    model: nn.Module,
    plan: Plan | str | Style | None = None,
    group: GroupLike = None,
    *,
    sequence_parallel: bool = False,
    overlap_pieces: int | None = None,
    attention_rules: tuple[AttentionRule, ...] = (),
    sync_module_states: bool = True,
) -> nn.Module:
    """Divides the modules that a plan names between ranks, in place; all ranks of the group call it.

    Each keeps its class, its name and its hooks. Its parameters are replaced by this rank's parts, so an optimizer is
    built afterwards. The model may be on the meta device. `model.load_state_dict` takes whole tensors, and
    `initialise_whole` draws them. Where all ranks hold the same by the first forward, that ends in a RuntimeError.

    Args:
        model: The model.
        plan: Names of modules, or patterns of names, to styles (`scale_tp.conversion.styles.STYLES`). None is the
            plan that a model of transformers carries; and a style by itself is that of `model`, which is one layer
            then.
        group: The ranks; None is the model axis of `initialize_model_parallel`.
        sequence_parallel: Between the divided layers, each rank has a part of the sequence in place of all of it.
        overlap_pieces: Into how many pieces to cut what is sent, so that it travels beside the matrix products, as in
            `ColumnParallelLinear` and `RowParallelLinear`; the numbers are the same. None does not overlap.
        attention_rules: What to know of attention modules beside `ATTENTION_RULES`; the first one that fits counts.
        sync_module_states: Send the values of the group's first rank to all before, so that the parts are those of one
            model. Without it, all ranks have to have the same values, as from one seed or one checkpoint.

    Returns:
        The model.

    Raises:
        TypeError: An argument or a style is none, or the module that it is for can't be divided.
        ValueError: The plan does not fit the model, or the ranks differ; nothing has been changed then.

    Example:
        parallelize(model, {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, mesh["tensor"])
    """
    plan = {"": plan} if isinstance(plan, str | Style) else plan
    check_kinds(model, plan, attention_rules)
    ranks = layer_group(group)
    check_overlap(overlap_pieces)
    carried = plan is None
    plan = _carried(model) if plan is None else plan
    modules = dict(model.named_modules())
    if carried:
        check_carried(type(model).__name__, plan, modules)
    styles = resolve(plan, modules, needs_all=not carried)
    if carried:
        check_layers_divided(model, styles)
    acting = {path: style for path, style in styles.items() if style != Style("nothing")}
    work = _prepared(
        model,
        acting,
        ranks,
        sequence_parallel=sequence_parallel,
        overlap_pieces=overlap_pieces,
        rules=(*attention_rules, *ATTENTION_RULES),
    )
    check_beside(modules, styles)
    agree("parallelize", work.words(), ranks)
    if ranks.size > 1:
        if sync_module_states:
            _send_values(model, ranks)
        work.carry_out()
    return model


def _carried(model: nn.Module) -> Plan:
    """The plan that a model of transformers has, with that of the models in it."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(
            f"{type(model).__name__} carries no plan (_tp_plan): pass one, such as "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or '
            "for the GPT-2 of transformers scale_tp.GPT2_PLAN"
        )
    return plan


@torch.no_grad()
def _send_values(model: nn.Module, group: Group) -> None:
    """Gives all ranks the parameters and buffers of the first one."""
    for tensor in (*model.parameters(), *model.buffers()):
        # What is a part of something is each rank's own.
        if not tensor.is_meta and shard_of(tensor) is None:
            sent = tensor.detach().contiguous()
            broadcast(sent, group).wait()
            tensor.copy_(sent)


@dataclass(frozen=True)
class _Whole:
    """A parameter that is no longer the model's, by its name: an optimizer that was built before holds it yet."""

    names: list[str]


@dataclass
class _Work:
    """All that is to be done."""

    model: nn.Module
    group: Group
    changes: list[Change]
    heads: list[Heads]
    mended: list[dict[str, int]]
    randomness: list[tuple[nn.Module, DividedRandomness]]
    entrances: list[tuple[nn.Module, Entrance]]
    stretch: Stretch | None
    overlap_pieces: int | None

    def words(self) -> str:
        """What has to be the same on all ranks."""
        overlaps = "" if self.overlap_pieces is None else f", overlap_pieces={self.overlap_pieces}"
        found = [f"{len(self.changes)} modules, {'' if self.stretch is None else 'sequence parallel'}{overlaps}"]
        for change in self.changes:
            params = [
                (name, tuple(param.shape), str(param.dtype))
                for name, param in change.module.named_parameters(recurse=False)
            ]
            found.append(f"{change.path} as {change.kind.__name__} of {params}: {change.split}")
        return "; ".join(found)

    def carry_out(self) -> None:
        """Divides everything; tied parameters stay tied."""
        parts: dict[Tensor, nn.Parameter] = {}
        for change in self.changes:
            own = dict(change.module.named_parameters(recurse=False))
            divide(change.module, change.kind, self.group, change.placements, **change.attributes())
            for name, param in own.items():
                placement = change.placements[name]
                if placement.split is None:
                    continue
                if param not in parts:
                    mark_replaced(param, _Whole([f"{change.path}.{name}"]), 0)
                    parts[param] = part_of(param, placement, self.group)
                change.module.register_parameter(name, parts[param])
        for heads, values in zip(self.heads, self.mended, strict=True):
            for name, value in values.items():
                setattr(heads.module, name, value)
        for module, drawn in self.randomness:
            module.register_forward_pre_hook(drawn.before)
            module.register_forward_hook(drawn.after, always_call=True)
        for module, entrance in self.entrances:
            module.register_forward_hook(entrance.forget, always_call=True)
        if self.stretch is not None:
            divide_stretch(self.model, self.stretch, self.group, self.overlap_pieces)
        watch_first_forward(self.model, self.group)
        # What is left is the same on all ranks; whoever adds something up over them has to know.
        for param in self.model.parameters():
            if shard_of(param) is None:
                mark(param, Placement(tuple(param.shape)).shard(self.group))


def _prepared(
    model: nn.Module,
    styles: dict[str, Style],
    ranks: Group,
    *,
    sequence_parallel: bool,
    overlap_pieces: int | None,
    rules: tuple[AttentionRule, ...],
) -> _Work:
    """Looks at everything, and changes nothing."""
    modules = dict(model.named_modules())
    check_groups(modules, ranks)
    check_divisible(modules, styles)
    check_adapters(modules, styles)
    heads = all_heads(modules, styles, ranks, rules)
    splits = {path: weight_split(path, modules[path], style, ranks, heads) for path, style in styles.items()}
    check_key_values(modules, styles, heads)
    stretch = stretch_of(model, modules, styles) if sequence_parallel else None
    check_sequences(styles, lambda path: stretch is not None and stretch.holds(path))
    check_sums(styles, lambda path: stretch is not None and stretch.holds(path) and path not in stretch.gathering)
    all_styles = styles if stretch is None else {**stretch.alike, **styles}
    changes = [
        change_of(path, module, all_styles[path], splits.get(path), stretch is not None and stretch.holds(path))
        for path, module in modules.items()
        if path in all_styles
    ]
    check_neighbours(changes)
    check_ties(model, changes)
    check_summands(styles)
    mended = [found.mended(ranks.rank) for found in heads.values()]
    changes, entrances, randomness = _connected(changes, ranks, stretch, overlap_pieces)
    drawing = [(modules[path], drawn) for path, drawn in randomness.items()]
    entering = [(modules[path], entrance) for path, entrance in entrances.items()]
    return _Work(model, ranks, changes, list(heads.values()), mended, drawing, entering, stretch, overlap_pieces)


class _Connected(NamedTuple):
    """Changes that know what they have in common with those beside them.

    Attributes:
        changes: The changes.
        entrances: The ways into the divided region, by the name of the module that holds those who take them.
        randomness: The random numbers inside of it, in the same way.
    """

    changes: list[Change]
    entrances: dict[str, Entrance]
    randomness: dict[str, DividedRandomness]


def _connected(changes: list[Change], ranks: Group, stretch: Stretch | None, overlap_pieces: int | None) -> _Connected:
    """Gives layers what they have in common with those that the same module holds."""
    columns = [change for change in changes if change.kind is Columns]
    readers = Counter(change.parent for change in columns)
    first = {change.parent: change for change in reversed(columns)}
    entrances = {
        parent: Entrance(ranks, number, _way(first[parent], stretch), overlap_pieces)
        for parent, number in readers.items()
    }
    randomness = {change.parent: DividedRandomness(ranks) for change in columns if not change.gathers}
    connected = [
        replace(
            change,
            entrance=entrances[change.parent] if change.kind is Columns else None,
            overlap_pieces=overlap_pieces,
            randomness=randomness.get(change.parent),
        )
        for change in changes
    ]
    return _Connected(connected, entrances, randomness)


def _way(change: Change, stretch: Stretch | None) -> Literal["copy", "gather", "inside"]:
    """How an input comes into the divided region (see `Entrance`)."""
    if stretch is None or not stretch.holds(change.path):
        return "copy"
    return "inside" if change.parent in stretch.gathering else "gather"
