"""Plans that do not fit their model, found before anything is changed.

Each check says what was expected, what came, and what to write in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from scale_core.comm.group import Group
from scale_core.shard import Held, shard_of
from scale_tp.attention_heads import AttentionRule, Heads
from scale_tp.conversion.convert import Change
from scale_tp.conversion.modules import Columns, Rows, is_embedding, is_linear
from scale_tp.conversion.styles import STYLES, Style
from scale_tp.layers.base import ParallelModule, Placement
from scale_tp.split import Split


def check_kinds(model: object, plan: object, attention_rules: object) -> None:
    """Refuses arguments of another kind than is expected, and a plan that says nothing."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a model, a torch.nn.Module, got {type(model).__name__}")
    if plan is not None and not isinstance(plan, Mapping):
        raise TypeError(
            f"expected a plan from names of modules to styles, got {type(plan).__name__}: write "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}'
        )
    if plan is not None and not plan:
        raise ValueError("expected a plan that names a module at least, got an empty one: nothing would be divided")
    rules = attention_rules if isinstance(attention_rules, tuple) else (attention_rules,)
    if not isinstance(attention_rules, tuple) or not all(isinstance(rule, AttentionRule) for rule in rules):
        raise TypeError(
            "expected attention_rules to be a tuple of scale_tp.AttentionRule, got "
            f"{', '.join(type(rule).__name__ for rule in rules)}: write attention_rules=(AttentionRule(...),)"
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
    """Refuses modules that are divided already, or are none that a style can divide."""
    for path, style in styles.items():
        module = modules[path]
        if isinstance(module, ParallelModule) or any(map(_is_divided, module.parameters(recurse=False))):
            raise ValueError(
                f"'{path}' is divided already, between the ranks of some group: divide a model once, before "
                "fully_shard and OSS"
            )
        fits = {
            "outputs": is_linear(module),
            "inputs": is_linear(module),
            "words": is_embedding(module),
            "width": is_embedding(module),
        }.get(style.divides, True)
        if not fits:
            expected = "an nn.Linear" if style.divides in ("outputs", "inputs") else "an nn.Embedding"
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            mend = "leave it out of the plan"
            if isinstance(getattr(module, "base_layer", None), nn.Module):  # As the layers of peft.
                mend = f"give the style to the layer in it, '{path}.base_layer', and styles to what stands beside that"
            raise TypeError(f"'{path}': expected {expected} to divide its {style.divides}, got {kind}: {mend}")
        if style.divides not in ("sequence", "nothing") and module._parameters.get("weight") is None:
            raise TypeError(
                f"'{path}': expected its weight to be a parameter, but it is computed from others, as by a "
                "parametrization: leave it out of the plan, or remove that before"
            )
        if style.divides in ("words", "width") and getattr(module, "max_norm", None) is not None:
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
    """Refuses a dropout before the small layers beside a divided one: ranks would drop other elements of one input."""
    for path, style in styles.items():
        around, _, name = path.rpartition(".")
        if name != "base_layer" or style.divides not in ("outputs", "inputs"):
            continue
        for below in modules[around].modules():
            if isinstance(below, nn.Dropout) and below.p > 0:
                raise ValueError(
                    f"'{around}' drops {below.p:g} of what the small layers beside '{path}' read, and the ranks would "
                    "not drop the same: build it without, LoraConfig(lora_dropout=0), or merge it before, "
                    "model.merge_and_unload()"
                )


def check_layers_divided(model: nn.Module, styles: Mapping[str, Style]) -> None:
    """Refuses a plan that a model carries where it leaves all repeated layers whole, as one of a head alone.

    Args:
        model: It carries the plan.
        styles: By the names of modules, what the plan says of them.

    Raises:
        ValueError: It does.
    """
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
    said = {path: _name_of(styles[path]) for path in divided}
    raise ValueError(
        f"the plan that {type(model).__name__} carries divides {', '.join(divided) or 'nothing'}, "
        f"{100 * sum(parts.values()) / total:.0f} % of its parameters, and nothing in {layers[0]}, which every rank "
        "would have whole: pass a plan that divides these layers, or shard the model (fully_shard of scale-fsdp); if "
        f"that is all you want to divide, say so: parallelize(model, {said})"
    )


def _name_of(style: Style) -> str:
    return next((name for name, known in STYLES.items() if known == style), str(style))


def check_beside(modules: Mapping[str, nn.Module], styles: Mapping[str, Style]) -> None:
    """Refuses parameters of which it is not known whether ranks compute with them on parts or on all.

    What stands beside divided layers in one module may compute on what they give. Each rank then has a summand of its
    gradients alone, and nothing else would show that they are wrong.
    """
    parents = {path.rpartition(".")[0] for path, style in styles.items() if style.output == "part"}
    divided = {path for path, style in styles.items() if style.divides not in ("nothing", "sequence")}
    for path in modules:
        within: list[str] = []
        if path in parents:
            within = [path]  # Its own parameters; what it holds has its turn.
        elif path.rpartition(".")[0] in parents:
            within = [below for below in modules if below == path or below.startswith(f"{path}.")]
        if divided.intersection(within):
            continue
        for below in within:
            if below not in styles and next(modules[below].parameters(recurse=False), None) is not None:
                raise ValueError(
                    f"'{below}' ({type(modules[below]).__name__}) has parameters and stands beside divided layers: "
                    "give it the style 'replicate' if it computes on what all ranks have and gives it to what all "
                    "compute alike, and 'replicated_with_grad_allreduce' if it computes on what 'colwise' layers give"
                )


def check_key_values(modules: Mapping[str, nn.Module], styles: Mapping[str, Style], heads: Mapping[str, Heads]) -> None:
    """Refuses keys and values that all ranks compute whole beside queries that are divided.

    Each rank's queries give a summand of their gradients, and what they are computed from would have to come into the
    divided region as well. Divided, a head that several ranks need is a copy on each, and all of this is done.
    """
    for parent, found in heads.items():
        for name in found.rule.key_value:
            path = f"{parent}.{name}" if parent else name
            style = styles.get(path)
            if path in modules and is_linear(modules[path]) and (style is None or style.output != "part"):
                raise ValueError(
                    f"'{path}' gives whole keys or values to queries that '{parent}' divides, so each rank would have "
                    "a part of its gradient: give it the style 'colwise', also where there are fewer key-value heads "
                    "than ranks; then some have copies of one"
                )


def check_neighbours(changes: Sequence[Change]) -> None:
    """Refuses layers of one module that hand each other parts which are cut in different ways."""
    parents: dict[str, list[Change]] = {}
    for change in changes:
        parents.setdefault(change.parent, []).append(change)
    for siblings in parents.values():
        giving = [change for change in siblings if change.kind is Columns and not change.gathers]
        for taking in siblings:
            if taking.kind is not Rows or taking.splits_input:
                continue
            wanted, given = taking.weight_split, [change.weight_split for change in giving]
            sizes = [one for split in given for one in _things(split, wanted.total)]
            if sizes and wanted not in sizes:
                raise ValueError(
                    f"'{taking.path}' takes {wanted.total} inputs in parts of {list(wanted.sizes)}, but "
                    f"'{giving[0].path}' gives {given[0].total} outputs in parts of {list(given[0].sizes)}: give "
                    "them styles of one kind, such as 'colwise' and 'rowwise'"
                )


def _things(split: Split, total: int) -> list[Split]:
    """The splits of so many indices that a split is, or is stacked of."""
    if split.total == total:
        return [split]
    count = split.total // total if total and split.total % total == 0 else 0
    found = []
    for number in range(count):
        first, last = number * total, (number + 1) * total
        ranges = tuple(
            tuple((start - first, stop - first) for start, stop in held if first <= start and stop <= last)
            for held in split.ranges
        )
        if all(ranges):
            found.append(Split(total, ranges))
    return found


def check_ties(model: nn.Module, changes: Sequence[Change]) -> None:
    """Refuses a parameter that two modules share, of which only one is divided, or each in another way."""
    placed: dict[Tensor, dict[str, Placement | None]] = {}
    by_path = {change.path: change for change in changes}
    for path, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            change = by_path.get(path)
            placement = change.placements.get(name) if change is not None else None
            if placement is not None and placement.split is None:
                placement = None
            placed.setdefault(param, {})[f"{path}.{name}"] = placement
    for places in placed.values():
        if len(set(places.values())) > 1:
            divided = [name for name, placement in places.items() if placement is not None]
            others = [name for name in places if name != divided[0]]
            raise ValueError(
                f"'{divided[0]}' and '{others[0]}' are one parameter, but the plan does not divide both in one way: "
                "give both modules a style, such as 'embedding_rowwise' to the embedding and 'colwise_gather_output' "
                "to the head, or neither"
            )


def check_sequences(styles: Mapping[str, Style], within: Callable[[str], bool]) -> None:
    """Refuses modules that would compute on a part of the sequence where all ranks have the whole of it."""
    for path, style in styles.items():
        if style.divides == "sequence" and not within(path):
            raise ValueError(
                f"'{path}' has the style 'sequence_parallel', but here each rank has the whole sequence, and the sum "
                "of its gradients would be too large: pass sequence_parallel=True if it stands in one of the blocks, "
                "or give it the style 'replicate'"
            )


def check_sums(styles: Mapping[str, Style], on_a_part: Callable[[str], bool]) -> None:
    """Refuses to sum what a module gives where each rank has another part of the sequence."""
    for path, style in styles.items():
        if style.divides == "nothing" and style.input == "part" and on_a_part(path):
            raise ValueError(
                f"sequence_parallel=True: '{path}' sums what its ranks give, and each has another part of the "
                "sequence: expected it to hold the divided layers itself, so that the sequence is gathered before it; "
                "give its 'local_rowwise' layers the style 'rowwise', or pass sequence_parallel=False"
            )


def check_summands(styles: Mapping[str, Style]) -> None:
    """Refuses summands that nobody sums."""
    summing = [path for path, style in styles.items() if style.divides == "nothing" and style.input == "part"]
    for path, style in styles.items():
        if style.output == "summand" and not any(path == outer or path.startswith(f"{outer}.") for outer in summing):
            raise ValueError(
                f"'{path}' gives a summand on each rank, but no module around it sums them: give the module that holds "
                "it the style 'gather', or this one the style 'rowwise'"
            )


def _is_divided(param: Tensor) -> bool:
    shard = shard_of(param)
    return shard is not None and any(axis.held is Held.SHARD for axis in shard.axes)
