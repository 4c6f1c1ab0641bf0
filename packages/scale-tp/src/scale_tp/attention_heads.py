"""Rules for attention modules whose heads are divided: which attributes depend on the number of heads.

A module that was written for one process reshapes by its own number of heads. Where its projections are divided, that
number is another one, and so is whatever depends on it. The meaning of each attribute is written down here, as rules
with names; a module that no rule fits is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from scale_tp.split import HeadSplit, Split, split_heads

_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "n_local_heads")
_KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_local_kv_heads")
_FUSED_IN_SEVERAL_WAYS = ("query_key_value",)
_HEAD_SIZES = ("head_dim", "attention_head_size", "head_size")


@dataclass(frozen=True)
class AttentionRule:
    """The names of parts in a family of attention modules, and the attributes that depend on the number of heads.

    Attributes:
        name: The name of the family in errors.
        query: The projections of the queries that are known, by name.
        key_value: The projections of the keys and values.
        fused: Projections of all three in one.
        layout: The order of their outputs: "stacked": all queries, then all keys, then all values. "by_head": query,
            key and value of the first head, then of the second.
        classes: The attention modules, by the names of their classes, that it is for; none named is all.
        not_classes: The attention modules that it is not for, whatever their parts are called.
        heads: Attributes that hold the number of heads.
        key_value_heads: Attributes that hold the number of key-value heads.
        ratio: Attributes that hold how many heads share a key-value head.
        widths: Attributes that hold the heads times the head size.

    Examples:
        >>> from scale_tp import AttentionRule
        >>> rule = AttentionRule("Mine", query=("q",), key_value=("k", "v"), heads=("num_heads",))
        >>> rule.query
        ('q',)

    See also: [the guide to existing models](../guides/tensor-parallel.md#existing-models-parallelize).
    """

    name: str
    query: tuple[str, ...] = ()
    key_value: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    layout: Literal["stacked", "by_head"] = "stacked"
    classes: tuple[str, ...] = ()
    not_classes: tuple[str, ...] = ()
    heads: tuple[str, ...] = _HEADS
    key_value_heads: tuple[str, ...] = _KEY_VALUE_HEADS
    ratio: tuple[str, ...] = ("num_key_value_groups", "n_rep")
    widths: tuple[str, ...] = ("split_size", "all_head_size", "inner_dim")

    def fits(self, module: nn.Module) -> bool:
        """Whether it is for modules of this class."""
        names = {base.__name__ for base in type(module).__mro__}
        return not names.intersection(self.not_classes) and (not self.classes or bool(names.intersection(self.classes)))


ATTENTION_RULES: tuple[AttentionRule, ...] = (
    AttentionRule("projections one by one", query=("q_proj", "wq", "query", "q"),
                  key_value=("k_proj", "v_proj", "wk", "wv", "key", "value", "k", "v")),
    AttentionRule("GPT-NeoX", fused=("query_key_value",), layout="by_head", classes=("GPTNeoXAttention",)),
    # The content of `query_key_value` differs from one family to the next, and no attribute says how, so only rules
    # for a class name it. The same goes for these classes, whose names would fit.
    AttentionRule("one projection for all three", fused=("c_attn", "qkv", "qkv_proj", "Wqkv"),
                  not_classes=("CodeGenAttention", "GPTBigCodeAttention")),
)  # fmt: skip
"""The rules that `parallelize` knows; pass others as `attention_rules`."""


@dataclass(frozen=True)
class Heads:
    """The heads of one attention module."""

    module: nn.Module
    path: str
    rule: AttentionRule
    split: HeadSplit  # which heads each rank computes
    head_size: int  # the width of one head

    def projection_split(self, name: str) -> Split | None:
        """Which outputs each rank has of a projection, by its name in the module; None if the rule does not know it."""
        query, key_value = (heads_to_features(split, self.head_size) for split in self.split)
        if name in self.rule.fused:
            if self.rule.layout == "by_head":
                return heads_to_features(self.split.query, 3 * self.head_size)
            return Split.stacked(query, key_value, key_value)
        if name in self.rule.query:
            return query
        return key_value if name in self.rule.key_value else None

    def local_attributes(self, rank: int) -> dict[str, int]:
        """Returns the attributes that depend on the number of heads, with this rank's values."""
        num_heads, heads = self.split.query.total, self.split.query.sizes[rank]
        whole_key_value, key_value_heads = self.split.key_value.total, self.split.key_value.sizes[rank]
        values = {  # its value in the full module, and its value here
            **dict.fromkeys(self.rule.heads, (num_heads, heads)),
            **dict.fromkeys(self.rule.key_value_heads, (whole_key_value, key_value_heads)),
            **dict.fromkeys(self.rule.ratio, (num_heads // whole_key_value, heads // max(key_value_heads, 1))),
            **dict.fromkeys(self.rule.widths, (num_heads * self.head_size, heads * self.head_size)),
        }
        attributes = {}
        for name, (before, local_value) in values.items():
            has = getattr(self.module, name, None)
            if isinstance(has, int) and not isinstance(has, bool):
                if has != before:
                    raise ValueError(
                        f"'{self.path}': expected its attribute {name} to be {before}, as its heads say (rule "
                        f"{self.rule.name!r}), got {has}: pass an AttentionRule of your own in attention_rules"
                    )
                attributes[name] = local_value
        return attributes


def heads_to_features(heads: Split, head_size: int) -> Split:
    """Converts a split of heads to one of features.

    Example:
        >>> heads_to_features(Split.even(3, 2), 4)
        Split(total=12, ranges=(((0, 8),), ((8, 12),)))
    """
    ranges = tuple(
        tuple((start * head_size, stop * head_size) for start, stop in head_ranges) for head_ranges in heads.ranges
    )
    return Split(heads.total * head_size, ranges)


def find_heads(
    module: nn.Module, path: str, children: Mapping[str, int], num_ranks: int, rules: tuple[AttentionRule, ...]
) -> Heads | None:
    """Returns the heads of a module whose projections are divided, or None; `children` are their numbers of outputs."""
    for rule in rules:
        queries = [name for name in children if name in rule.query or name in rule.fused]
        if not queries or not rule.fits(module):
            continue
        heads = _number(module, rule.heads, _HEADS)
        if heads is None:
            continue
        key_value_heads = _number(module, rule.key_value_heads, _KEY_VALUE_HEADS) or heads
        if queries[0] in rule.fused and heads != key_value_heads:
            _check_fused(f"'{path}.{queries[0]}'", rule, heads, key_value_heads, num_ranks)
        size = _head_size(module, path, rule, queries[0], heads, key_value_heads, children)
        if num_ranks > heads:
            raise ValueError(
                f"'{path}': expected at least one head for each of {num_ranks} ranks, got {heads} heads: divide it "
                f"between {heads} ranks at most, or leave its projections out of the plan"
            )
        return Heads(module, path, rule, split_heads(heads, key_value_heads, num_ranks), size)
    sources = [f"its attribute {name}" for name in _HEADS if isinstance(getattr(module, name, None), int)]
    sources += [f"its projection {name}" for name in children if name in _FUSED_IN_SEVERAL_WAYS]
    if sources and children:
        first = next(iter(children))
        field = f"fused=({first!r},), layout='by_head'" if first in _FUSED_IN_SEVERAL_WAYS else f"query=({first!r},)"
        raise ValueError(
            f"'{path}' ({type(module).__name__}) computes with {sources[0]}, but no rule fits its "
            f"projections {', '.join(children)}: pass attention_rules=(AttentionRule({type(module).__name__!r}, "
            f"{field}, ...),), or give it the style 'colwise_gather_output'"
        )
    return None


def _check_fused(what: str, rule: AttentionRule, heads: int, key_value_heads: int, num_ranks: int) -> None:
    """Refuses a fused projection with fewer key-value heads than heads where it can't be divided."""
    if rule.layout == "by_head":
        raise ValueError(
            f"{what}: the rule {rule.name!r} says that the query, key and value of each head are together, got {heads} "
            f"heads and {key_value_heads} key-value heads: give it the style 'colwise_gather_output'"
        )
    if num_ranks > key_value_heads:
        raise ValueError(
            f"{what}: expected at least one key-value head for each of {num_ranks} ranks in a fused projection, got "
            f"{key_value_heads}: divide it between as many ranks, or give it the style 'colwise_gather_output'"
        )


def _head_size(
    module: nn.Module,
    path: str,
    rule: AttentionRule,
    query: str,
    heads: int,
    key_value_heads: int,
    children: Mapping[str, int],
) -> int:
    """Returns the size of one head, after comparing it with the outputs of each projection."""
    in_query = heads + 2 * key_value_heads if query in rule.fused else heads
    candidates = (getattr(module, name, None) for name in _HEAD_SIZES)
    size = next((candidate for candidate in candidates if isinstance(candidate, int)), children[query] // in_query)
    expected = {query: in_query * size} | {name: key_value_heads * size for name in children if name in rule.key_value}
    for name, number in expected.items():
        if children[name] != number:
            raise ValueError(
                f"'{path}.{name}': expected {number} outputs for {heads} heads and {key_value_heads} key-value heads "
                f"of {size}, got {children[name]}: pass an AttentionRule of your own in attention_rules"
            )
    return size


def _number(module: nn.Module, names: tuple[str, ...], in_config: tuple[str, ...]) -> int | None:
    """Returns the first of these attributes that is an integer, of the module or else of its config."""
    config = getattr(module, "config", None)
    for owner, attributes in ((module, names), (config, in_config)):
        for name in attributes:
            value = getattr(owner, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None
