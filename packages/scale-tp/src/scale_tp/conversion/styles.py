"""Parallel styles and plans: how each module of a model is divided, by names or patterns of names.

The styles are from transformers, whose models carry such plans (`_tp_plan`).
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

from scale_core.arguments import checked_arguments, did_you_mean
from scale_tp.split import check_size

SplitKind: TypeAlias = Literal["outputs", "inputs", "words", "width", "sequence", "nothing"]
Input: TypeAlias = Literal["whole", "part"]
Output: TypeAlias = Literal["whole", "part", "summand"]
_ALLOWED = {"divides": get_args(SplitKind), "input": get_args(Input), "output": get_args(Output)}


@checked_arguments
@dataclass(frozen=True)
class Style:
    """How one module is divided between ranks.

    Attributes:
        divides: The dimension of the weight that is divided: the outputs or inputs of a linear layer, the words or
            the width of an embedding; "sequence" divides no weight, but the module's activations; and "nothing".
        input: The input: all of it, the same on all ranks, or a rank's shard, as a layer before gives it.
        output: The output: all of it, a rank's "part", or a "summand" that a later module sums.
        stacked: How many matrices of equal size the weight is made of, each divided by itself: 2 for gate and up
            projections in one layer.
        interleaved: The matrices of several outputs alternate row by row, as where the model takes `x[..., ::2]` and
            `x[..., 1::2]`; so that each part has rows of all of them.
        sums_gradients: The parameters are replicated, but ranks compute with other data, so their gradients are summed.

    Examples:
        >>> from scale_tp import Style
        >>> Style("outputs", output="part", stacked=3)  # a fused projection of queries, keys and values
        Style(divides='outputs', input='whole', output='part', stacked=3, sums_gradients=False, interleaved=False)

    See also: [the guide to existing models](../guides/tensor-parallel.md#existing-models-parallelize).
    """

    divides: SplitKind
    input: Input = "whole"
    output: Output = "whole"
    stacked: int = 1
    sums_gradients: bool = False
    interleaved: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        for field, allowed in _ALLOWED.items():
            if (value := getattr(self, field)) not in allowed:
                raise ValueError(f"expected {field} of a style to be one of {', '.join(allowed)}, got {value!r}")
        check_size("stacked", self.stacked, 1)


STYLES: Mapping[str, Style] = MappingProxyType(
    {
        "colwise": Style("outputs", output="part"),
        "colwise_rep": Style("outputs"),
        "colwise_gather_output": Style("outputs"),
        "packed_colwise": Style("outputs", output="part", stacked=2),
        "interleaved_colwise": Style("outputs", output="part", interleaved=True),
        "rowwise": Style("inputs", input="part"),
        "rowwise_rep": Style("inputs"),
        "rowwise_split_input": Style("inputs"),
        "packed_rowwise": Style("inputs", input="part", stacked=2),
        "embedding_rowwise": Style("words"),
        "embedding_colwise": Style("width"),
        "sequence_parallel": Style("sequence", sums_gradients=True),
        "replicated_with_grad_allreduce": Style("nothing", sums_gradients=True),
        "replicate": Style("nothing"),
        "replicated": Style("nothing"),
        "local": Style("nothing"),
        "local_colwise": Style("outputs", output="part"),
        "local_rowwise": Style("inputs", input="part", output="summand"),
        "local_packed_rowwise": Style("inputs", input="part", output="summand", stacked=2),
        "gather": Style("nothing", input="part"),
        "all_reduce": Style("nothing", input="part"),
    }
)
"""The styles by the names that transformers gives them, also in older releases; and "interleaved_colwise"."""

UNSUPPORTED_STYLES: Mapping[str, str] = MappingProxyType(
    {
        "moe_tp_experts": "it divides experts, which are one tensor for all",
        "moe_identity_expert": "it divides experts",
        "grouped_gemm": "it divides experts, which are one tensor for all",
        "local_params": "it divides experts",
        "ep_dispatch_experts": "it divides experts",
        "ep_router": "it divides experts",
        "mla_kv_a_proj": "it needs to know which part of an output other layers divide again",
    }
)
"""Styles of transformers that are not supported, and why."""

_OF_TORCH = {
    "ColwiseParallel": "write 'colwise', or 'colwise_gather_output' for output_layouts=Replicate(); for an embedding "
    "'embedding_colwise'",
    "RowwiseParallel": "write 'rowwise', or 'rowwise_split_input' for input_layouts=Replicate(); for an embedding "
    "'embedding_rowwise'. For output_layouts=Shard(1) pass sequence_parallel=True to parallelize",
    "SequenceParallel": "write 'sequence_parallel', and pass sequence_parallel=True to parallelize",
    "PrepareModuleInput": "leave it out. With sequence_parallel=True, layers gather their inputs themselves",
    "PrepareModuleOutput": "leave it out. With sequence_parallel=True, layers divide their outputs themselves",
    "PrepareModuleInputOutput": "leave it out. With sequence_parallel=True, layers gather and divide by themselves",
}
"""Styles of torch's `parallelize_module`, and what to write instead."""

_UNSUPPORTED_WITH_SIBLINGS = ("mla_kv_a_proj",)  # Siblings divide its output.

Plan: TypeAlias = Mapping[str, "str | Style"]

GPT2_PLAN: Plan = MappingProxyType(
    {
        r"(.*\.)?wte": "embedding_rowwise",
        r"(.*\.)?lm_head": "colwise_gather_output",
        r"(.*\.)?h\.\d+\.attn\.c_attn": Style("outputs", output="part", stacked=3),
        r"(.*\.)?h\.\d+\.attn\.c_proj": "rowwise",
        r"(.*\.)?h\.\d+\.mlp\.c_fc": "colwise",
        r"(.*\.)?h\.\d+\.mlp\.c_proj": "rowwise",
    }
)
"""A plan for the GPT-2 of transformers, which carries none."""


def resolve_styles(plan: Plan, names: Iterable[str], *, needs_all: bool = True) -> dict[str, Style]:
    """Returns the style of each module that a plan names, in the order of the modules.

    A key of a plan is a name, a name with `*` for one part between dots, or a regular expression that matches the full
    name. If a key matches no name so, its parts between dots are `fnmatch` patterns, as in the plans of torch's
    `parallelize_module`.

    Example:
        >>> list(resolve_styles({"layers.*.up": "colwise"}, ["", "layers", "layers.0", "layers.0.up"]))
        ['layers.0.up']
    """
    names = list(names)
    style_by_path: dict[str, tuple[str, Style]] = {}
    for key, value in plan.items():
        matches = _matches(key, names)
        if not matches and not needs_all:
            continue
        style = _style_of(key, value)
        if not matches:
            raise ValueError(f"the plan's {key!r} matches none of the {len(names)} modules{_near(key, names)}")
        for name in matches:
            before, other = style_by_path.setdefault(name, (key, style))
            if other != style:
                raise ValueError(
                    f"the plan asks for two styles of '{name}': by {before!r} and by {key!r}: let one of them match it"
                )
    return {name: style_by_path[name][1] for name in names if name in style_by_path}


def check_model_plan(model: str, plan: Plan, names: Iterable[str]) -> None:
    """Refuses a model's own plan that matches no module, or has styles that are not supported."""
    names = list(names)
    matching = {key: value for key, value in plan.items() if any(map(_pattern(key).fullmatch, names))}
    if not matching:
        key, value = next(iter(plan.items()))
        near = (_nearest(key, names) or ["layers.*.up"])[0]
        raise ValueError(
            f"the plan that {model} carries matches none of its {len(names)} modules, as where the model that it is "
            f"for stands inside of another one: its {key!r} does not{_near(key, names)}: pass a plan with the names as "
            f"they are here, parallelize(model, {{{near!r}: {value!r}, ...}})"
        )
    refused = {key: value for key, value in matching.items() if value in UNSUPPORTED_STYLES}
    if not refused:
        return
    key, value = next(iter(refused.items()))
    # Modules inside of such a module, and consumers of such a projection, are left out with it.
    around = {key.rpartition(".")[0] if value in _UNSUPPORTED_WITH_SIBLINGS else key for key, value in refused.items()}
    left = {
        key: value
        for key, value in matching.items()
        if not any(key == outer or key.startswith(f"{outer}.") for outer in around)
    }
    raise ValueError(
        f"the plan that {model} carries asks for {value!r} of {key!r}, which is not supported "
        f"({UNSUPPORTED_STYLES[str(value)]}): "
        + (
            f"pass what is left of it, and all ranks compute the same in those modules: parallelize(model, {left})"
            if left
            else "nothing is left of it without such modules: pass a plan of your own, or shard the model"
        )
    )


def is_style(value: object) -> bool:
    """Whether it is a style or one of torch's styles, for which `resolve_styles` raises an error."""
    return isinstance(value, str | Style) or type(value).__name__ in _OF_TORCH


def _style_of(key: str, value: object) -> Style:
    if isinstance(value, Style):
        return value
    if not isinstance(value, str):
        kind = type(value).__name__
        hint = f", because layers take and give plain tensors here: {_OF_TORCH[kind]}" if kind in _OF_TORCH else ""
        raise TypeError(f"the plan's {key!r}: expected a style or the name of one, got {kind}{hint}")
    if value in UNSUPPORTED_STYLES:
        raise ValueError(
            f"the plan's {key!r}: the style {value!r} is not supported ({UNSUPPORTED_STYLES[value]}): leave it out of "
            "the plan, so that all ranks compute the same in that module"
        )
    if value not in STYLES:
        raise ValueError(f"the plan's {key!r}: unknown style {value!r}; {did_you_mean(value, sorted(STYLES))}")
    return STYLES[value]


def _pattern(key: str) -> re.Pattern[str]:
    parts = key.split(".")
    if all(part == "*" or part.isidentifier() or part.isdecimal() for part in parts):
        return re.compile(r"\.".join(r"[^.]+" if part == "*" else re.escape(part) for part in parts))
    try:
        return re.compile(key)
    except re.error as error:
        raise ValueError(f"the plan's {key!r} is neither a name nor a regular expression: {error}") from error


def _matches(key: str, names: Iterable[str]) -> list[str]:
    globbed = _glob_matches(key, names)
    try:
        return [name for name in names if _pattern(key).fullmatch(name)] or globbed
    except ValueError:
        if globbed:
            return globbed
        raise


def _glob_matches(key: str, names: Iterable[str]) -> list[str]:
    """The names whose parts between dots match the parts of a key, as `fnmatch` patterns."""
    patterns = key.split(".")
    return [
        name
        for name in names
        if len(parts := name.split(".")) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))
    ]


def _near(key: str, names: list[str]) -> str:
    """The part of an error about the names most like a key."""
    near = _nearest(key, names)
    listed = ", ".join(map(repr, near or _starred(names)[:5]))
    return f"; {'near it' if near else 'there'} are {listed}"


def _starred(names: list[str]) -> list[str]:
    """The names, with `*` in the place of numbers."""
    return list(dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names if name))


def _nearest(key: str, names: list[str]) -> list[str]:
    """Up to three names like a key, with `*` in the place of numbers."""
    starred = _starred(names)
    plain = re.sub(r"\\d\+|\d+", "*", key).replace("\\", "")
    near = difflib.get_close_matches(plain, starred, n=3, cutoff=0.5)
    # A name with the right last part is nearer than its letters say.
    last = plain.rsplit(".", 1)[-1]
    return list(dict.fromkeys([name for name in starred if name.rsplit(".", 1)[-1] == last][:3] + near))[:3]
