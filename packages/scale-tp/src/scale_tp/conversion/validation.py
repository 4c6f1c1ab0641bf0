"""Checks of a plan against its model, before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from scale_core.comm.group import Group
from scale_core.parameters import check_memory_unshared
from scale_core.shard import Placement, shard_of
from scale_tp.attention_heads import Heads
from scale_tp.conversion.convert import Conversion
from scale_tp.conversion.modules import ColumnParallelMixin, RowParallelMixin, is_embedding, is_linear, output_dim
from scale_tp.conversion.styles import STYLES, Style
from scale_tp.layers.base import ParallelModule, ParamSharding
from scale_tp.split import Split


def check_arguments(model: object, plan: object, attention_rules: object) -> None:
    """Refuses arguments of other types, and an empty plan."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, a torch.nn.Module, got {type(model).__name__}")
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(
            f"expected a plan from names of modules to styles, got {type(plan).__name__}: write "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    if plan is not None and not plan:
        raise ValueError("expected a plan that names a module at least, got an empty one: nothing would be divided")
    if not isinstance(attention_rules, tuple):
        raise TypeError(
            f"expected attention_rules to be a tuple of scale_tp.AttentionRule, got {type(attention_rules).__name__}: "
            "write attention_rules=(AttentionRule(...),)"
        )


def check_groups(modules: Mapping[str, nn.Module], group: Group) -> None:
    """Refuses layers of another group in one model: parts of one would be taken for parts of the other."""
    for path, module in modules.items():
        if isinstance(module, ParallelModule) and module.group.ranks != group.ranks:
            raise ValueError(
                f"'{path}' is divided between the ranks {list(module.group.ranks)}, and the plan divides others "
                f"between {list(group.ranks)}: pass one group to all of them"
            )


def check_divisible(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> None:
    """Refuses modules that are divided already, or that their style can't divide."""
    for path, style in styles.items():
        module = modules[path]
        if isinstance(module, ParallelModule) or any(map(_is_divided, module.parameters(recurse=False))):
            raise ValueError(
                f"'{path}' is divided already, between the ranks of some group: divide a model once, before "
                "fully_shard and OSS"
            )
        for_linear, for_embedding = style.divides in ("outputs", "inputs"), style.divides in ("words", "width")
        if (for_linear and not is_linear(module)) or (for_embedding and not is_embedding(module)):
            expected = "an nn.Linear" if for_linear else "an nn.Embedding"
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            mend = "leave it out of the plan"
            if isinstance(getattr(module, "base_layer", None), nn.Module):  # As the layers of peft.
                mend = f"give the style to the layer in it, '{path}.base_layer', and styles to what stands beside that"
            raise TypeError(f"'{path}': expected {expected} to divide its {style.divides}, got {kind}: {mend}")
        if (for_linear or for_embedding) and module._parameters.get("weight") is None:
            raise TypeError(
                f"'{path}': expected its weight to be a parameter, but it is computed from others, as by a "
                "parametrization: leave it out of the plan, or remove that before"
            )
        if for_embedding and getattr(module, "max_norm", None) is not None:
            raise ValueError(
                f"'{path}': max_norm={module.max_norm} changes the weight while it is read, where a rank has only a "
                "part of it: leave the embedding out of the plan"
            )
        if style.divides == "words" and getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"'{path}': scale_grad_by_freq counts words, and words of other ranks would count as this rank's first "
                "one: leave the embedding out of the plan, or take scale_tp.VocabParallelEmbedding"
            )


def check_adapters(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> None:
    """Refuses dropout before adapters of a divided layer: ranks would drop different elements of one input."""
    for path, style in styles.items():
        around, _, name = path.rpartition(".")
        if name != "base_layer" or style.divides not in ("outputs", "inputs"):
            continue
        for below in modules[around].modules():
            if isinstance(below, nn.Dropout) and below.p > 0:
                raise ValueError(
                    f"'{around}' drops {below.p:g} of what the adapters of '{path}' read, and the ranks would "
                    "not drop the same: build it without, LoraConfig(lora_dropout=0), or merge it before, "
                    "model.merge_and_unload()"
                )


def check_layers_divided(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Refuses a model's own plan that divides none of its repeated layers, as one of a head alone."""
    modules = dict(model.named_modules())
    layers = [
        f"{path}.*"
        for path, module in modules.items()
        if isinstance(module, nn.ModuleList) and any(True for _ in module.parameters())
    ]
    divided = [path for path, style in styles.items() if style.divides not in ("nothing", "sequence")]
    if not layers or any(path.startswith(layer[:-1]) for path in divided for layer in layers):
        return
    total = sum(param.numel() for param in model.parameters())
    parts = {param: param.numel() for path in divided for param in modules[path].parameters()}
    style_names = {path: _name_of(styles[path]) for path in divided}
    raise ValueError(
        f"the plan that {type(model).__name__} carries divides {', '.join(divided) or 'nothing'}, "
        f"{100 * sum(parts.values()) / total:.0f} % of its parameters, and nothing in {layers[0]}, which every rank "
        "would replicate: pass a plan that divides these layers, or shard the model (fully_shard of scale-fsdp); if "
        f"that is all you want to divide, say so: parallelize(model, {style_names})"
    )


def _name_of(style: Style) -> str:
    return next((name for name, candidate in STYLES.items() if candidate == style), str(style))


def check_unstyled_siblings(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], heads: Mapping[str, Heads]
) -> None:
    """Refuses parameters without a style that fit both an output of 'colwise' layers and one that all ranks have.

    On a part, each rank would have a summand of their gradient alone, and nothing would show it (see DESIGN.md).
    """
    divided = {path for path, style in styles.items() if style.divides not in ("nothing", "sequence")}
    for parent in dict.fromkeys(path.rpartition(".")[0] for path, style in styles.items() if style.output == "part"):
        head_size = heads[parent].head_size if parent in heads else None
        full_widths, part_totals = _sibling_widths(modules, styles, parent)
        for below in modules:
            in_parent = below.startswith(f"{parent}.") if parent else below != ""
            child = f"{parent}.".lstrip(".") + below[len(parent) :].lstrip(".").partition(".")[0]
            if below in styles or not (below == parent or in_parent):
                continue
            if below != parent and any(path == child or path.startswith(f"{child}.") for path in divided):
                continue  # Layers in it are divided too, and have their own siblings.
            # A module of several layers that knows the full width takes that, and may narrow it.
            is_replicated = below not in (parent, child) and any(
                full_widths.intersection(param.shape) for param in modules[child].parameters()
            )
            for name, param in modules[below].named_parameters(recurse=False):
                gives_scalar = param.numel() == 1 or (param.dim() == 2 and param.shape[0] == 1)
                fits_part = not is_replicated and _fits_part(modules[below], name, param, full_widths, part_totals)
                if not gives_scalar and not fits_part and head_size not in param.shape:
                    continue
                path = f"{below}.{name}".lstrip(".")
                styled = below
                raise ValueError(
                    f"'{path}' {list(param.shape)} ({type(modules[below]).__name__}) is a sibling of divided layers, "
                    f"has no style, and fits a part of their output as well as all of it. Add {styled!r}: 'replicate' "
                    "if its input is the same on all ranks, or 'replicated_with_grad_allreduce' if its input is the "
                    "output of a 'colwise' layer."
                )


def _sibling_widths(
    modules: Mapping[str, nn.Module], styles: Mapping[str, Style], parent: str
) -> tuple[set[int], set[int]]:
    """Widths that all ranks have before and behind the divided layers of a module; and those that are divided."""
    full_widths, part_totals = set[int](), set[int]()
    for path, style in styles.items():
        if path.rpartition(".")[0] == parent and style.divides in ("outputs", "inputs") and is_linear(modules[path]):
            weight = modules[path].get_parameter("weight")
            outputs, inputs = (weight.shape[dim] for dim in (output_dim(modules[path]), 1 - output_dim(modules[path])))
            if style.input != "part":
                full_widths.add(inputs)
            if style.output == "part":
                part_totals.add(outputs)
            else:
                full_widths.add(outputs)
    return full_widths, part_totals


def _fits_part(module: nn.Module, name: str, param: Tensor, full_widths: set[int], part_totals: set[int]) -> bool:
    """Whether a parameter can be applied to each position, or to each head, of a part of any size."""
    # These compare the number of channels, or look rows up.
    if isinstance(module, _ConvNd | _BatchNorm | nn.GroupNorm | nn.Embedding):
        return False
    if isinstance(module, nn.Linear):
        widths = set[int](param.shape) if name == "weight" else set[int]()
    else:
        widths = {param.shape[-1]} if param.dim() else set[int]()
    return any(
        width == 1 or any(total % width == 0 and width < total for total in part_totals)
        for width in widths - full_widths
        if width
    )


def check_key_values(modules: Mapping[str, nn.Module], styles: Mapping[str, Style], heads: Mapping[str, Heads]) -> None:
    """Refuses keys and values that are not divided where their queries are: a rank would have a part of a gradient."""
    for parent, heads_of_parent in heads.items():
        for name in heads_of_parent.rule.key_value:
            path = f"{parent}.{name}" if parent else name
            style = styles.get(path)
            if path in modules and is_linear(modules[path]) and (style is None or style.output != "part"):
                raise ValueError(
                    f"'{path}' gives all keys or values to queries that '{parent}' divides: give it the style "
                    "'colwise', also where there are fewer key-value heads than ranks, of which some then have copies"
                )


def check_producer_splits(
    changes: Sequence[Conversion], styles: Mapping[str, Style], heads: Mapping[str, Heads]
) -> None:
    """Refuses row parallel layers whose input is divided in another way than their sibling's output."""
    parents: dict[str, list[Conversion]] = {}
    for change in changes:
        parents.setdefault(change.parent, []).append(change)
    for siblings in parents.values():
        giving = [one for one in siblings if one.mixin is ColumnParallelMixin and not one.attributes["gather_output"]]
        takers = [one for one in siblings if one.mixin is RowParallelMixin and not one.attributes["split_input"]]
        totals = {_split_of(taking).total for taking in takers}
        for taking in takers:
            expected_split, producer_splits = _split_of(taking), [_split_of(change) for change in giving]
            sizes = [one for split in producer_splits for one in _stacked_splits(split, expected_split.total)]
            if sizes and expected_split not in sizes:
                raise ValueError(
                    f"'{taking.path}' takes {expected_split.total} inputs in parts of {list(expected_split.sizes)}, "
                    f"but '{giving[0].path}' gives {producer_splits[0].total} outputs in parts of "
                    f"{list(producer_splits[0].sizes)}: give them styles of one kind, such as 'colwise' and 'rowwise'"
                )
            cut = [
                one
                for one, split in zip(giving, producer_splits, strict=True)
                if _is_cut(split, expected_split, totals)
            ]
            has_known_layout = bool(sizes) or taking.parent in heads or any(styles[one.path].interleaved for one in cut)
            if cut and not has_known_layout:
                fused = cut[0]
                total = _split_of(fused).total
                raise ValueError(
                    f"'{fused.path}' gives {total} outputs, and '{taking.path}' takes {expected_split.total} inputs: "
                    f"where the model cuts the output into {total // expected_split.total} parts, as by chunk(), a "
                    f"rank of a 'colwise' layer has other parts than it needs. Give '{fused.path}' the style "
                    f"{_stacked_style(total // expected_split.total)}, or 'interleaved_colwise' if the parts "
                    "alternate row by row"
                )


def _is_cut(given: Split, wanted: Split, taken: Collection[int]) -> bool:
    """Whether one layer gives a multiple of the inputs of another one, and no layer takes all of it."""
    return given.total > wanted.total > 0 and given.total % wanted.total == 0 and given.total not in taken


def _stacked_style(count: int) -> str:
    return "'packed_colwise'" if count == 2 else f"Style('outputs', output='part', stacked={count})"


def _split_of(change: Conversion) -> Split:
    split = change.shardings["weight"].split
    assert split is not None
    return split


def _stacked_splits(split: Split, total: int) -> list[Split]:
    """Returns the splits of so many indices that a split is, or is stacked of."""
    if split.total == total:
        return [split]
    count = split.total // total if total and split.total % total == 0 else 0
    splits = []
    for number in range(count):
        first, last = number * total, (number + 1) * total
        ranges = tuple(
            tuple((start - first, stop - first) for start, stop in rank_ranges if first <= start and stop <= last)
            for rank_ranges in split.ranges
        )
        if all(ranges):
            splits.append(Split(total, ranges))
    return splits


def check_tied_params(model: nn.Module, changes: Sequence[Conversion]) -> None:
    """Refuses a parameter that two modules share, if only one is divided, or each in another way."""
    placed: dict[Tensor, dict[str, ParamSharding | None]] = {}
    by_path = {change.path: change for change in changes}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            change = by_path.get(path)
            placement = change.shardings.get(name) if change is not None else None
            if placement is not None and placement.split is None:
                placement = None
            placed.setdefault(param, {})[f"{path}.{name}"] = placement
    for places in placed.values():
        if len(set(places.values())) > 1:
            divided = [name for name, placement in places.items() if placement is not None]
            others = [name for name in places if name != divided[0]]
            raise ValueError(
                f"'{divided[0]}' and '{others[0]}' are one parameter, but the plan does not divide both in one way: "
                "give neither a style, or such as 'embedding_rowwise' and 'colwise_gather_output' (the head) to both"
            )


def check_memory(model: nn.Module, changes: Sequence[Conversion]) -> None:
    """Refuses a parameter that is divided and shares memory with another tensor of the model."""
    divided = {
        id(param)
        for change in changes
        for name, param in change.module.named_parameters(recurse=False)
        if change.shardings[name].split is not None
    }
    tensors = [*model.named_parameters(), *model.named_buffers()]
    others = [(name, tensor) for name, tensor in tensors if id(tensor) not in divided]
    check_memory_unshared("parallelize", ((name, t) for name, t in tensors if id(t) in divided), others)


def check_sequence_styles(styles: Mapping[str, Style], within: Callable[[str], bool]) -> None:
    """Refuses modules that would compute on a part of the sequence where all ranks have all of it."""
    for path, style in styles.items():
        if style.divides == "sequence" and not within(path):
            raise ValueError(
                f"'{path}' has the style 'sequence_parallel', but here each rank has the full sequence: pass "
                "sequence_parallel=True if it is in one of the blocks, or give it the style 'replicate'"
            )


def check_output_reductions(styles: Mapping[str, Style], on_a_part: Callable[[str], bool]) -> None:
    """Refuses to sum a module's output where each rank has another part of the sequence."""
    for path, style in styles.items():
        if style.divides == "nothing" and style.input == "part" and on_a_part(path):
            raise ValueError(
                f"sequence_parallel=True: '{path}' sums what its ranks give, and each has another part of the "
                "sequence: give its 'local_rowwise' layers the style 'rowwise', or pass sequence_parallel=False"
            )


def check_partial_outputs(styles: Mapping[str, Style]) -> None:
    """Refuses partial outputs that no module around them sums."""
    summing = [path for path, style in styles.items() if style.divides == "nothing" and style.input == "part"]
    for path, style in styles.items():
        if style.output == "summand" and not any(path == outer or path.startswith(f"{outer}.") for outer in summing):
            raise ValueError(
                f"'{path}' gives a summand on each rank, but no module around it sums them: give the module that holds "
                "it the style 'gather', or this one the style 'rowwise'"
            )


def _is_divided(param: Tensor) -> bool:
    shard = shard_of(param)
    return shard is not None and any(axis.placement is Placement.SHARD for axis in shard.axes)
