"""Divides a model that exists already between ranks, by a plan of names and styles.

Everything is checked before anything is changed: which module has which style, where attention heads are cut, whether
each layer gets the input it expects from the one before, and whether all ranks are about to do the same.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn

from scale_core.arguments import checked_arguments, refuse_inference_mode
from scale_core.comm.collectives import broadcast
from scale_core.comm.group import Group, GroupLike
from scale_core.consistency.divergence import EVERY_VARIABLE, check_interval
from scale_core.consistency.same_call import check_same_call
from scale_core.optim.step_checks import register_replaced
from scale_core.shard import shard_of
from scale_core.sharded_tensor.tensor import set_shard
from scale_tp.attention_heads import ATTENTION_RULES, AttentionRule, Heads
from scale_tp.conversion import validation
from scale_tp.conversion.convert import Conversion, conversion_for, find_all_heads, weight_split
from scale_tp.conversion.model_hooks import FailedPass, OptimizerStepCheck, ReplicaCheck, register_input_checks
from scale_tp.conversion.modules import (
    ColumnParallelMixin,
    RowParallelMixin,
    VocabParallelMixin,
    WidthParallelMixin,
)
from scale_tp.conversion.replica_check import check_first_forward
from scale_tp.conversion.sequence_region import SequenceRegion, find_sequence_region, install_sequence_region
from scale_tp.conversion.styles import Plan, Style, check_model_plan, is_style, resolve_styles
from scale_tp.layers.base import ParamSharding
from scale_tp.layers.linear_ops import SharedInput
from scale_tp.layers.module_swap import local_parameter, swap_class
from scale_tp.parallel_state import tensor_parallel_group
from scale_tp.random import RegionRNG, may_drop
from scale_tp.split import check_size

_logger = logging.getLogger(__name__)

_TAKE_WHOLE_INPUTS = (ColumnParallelMixin, VocabParallelMixin, WidthParallelMixin)


@checked_arguments(own="model plan attention_rules")
def parallelize(
    model: nn.Module,
    plan: Plan | str | Style | None = None,
    process_group: GroupLike = None,
    *,
    sequence_parallel: bool = False,
    overlap_pieces: int | None = None,
    attention_rules: tuple[AttentionRule, ...] = (),
    sync_module_states: bool = True,
    check_inputs: bool = False,
    check_replicas_every: int | None = None,
) -> nn.Module:
    """Divides the modules that a plan names between ranks, in place; all ranks of the group call it.

    Each keeps its class, its name and its hooks. Its parameters are replaced by this rank's shards, so an optimizer is
    built afterwards. The model may be on the meta device. `model.load_state_dict` takes full tensors, and
    `init_as_full` draws them. Where all ranks hold the same by the first forward, that ends in a RuntimeError.

    Args:
        model: The model.
        plan: Names of modules, or patterns of names, to styles (`scale_tp.conversion.styles.STYLES`). None is the
            plan that a model of transformers carries; and a style by itself is for `model`, which is one layer
            then.
        process_group: The ranks; None is the model axis of `initialize_model_parallel`.
        sequence_parallel: Between the divided layers, each rank has a part of the sequence in place of all of it.
        overlap_pieces: The number of pieces of a message, so that it overlaps with the matrix products, as in
            `ColumnParallelLinear` and `RowParallelLinear`; the numbers are the same. None does not overlap.
        attention_rules: Rules for attention modules in addition to `ATTENTION_RULES`; the first that fits counts.
        sync_module_states: Send the values of the group's first rank to all before, so that the parts belong to one
            model. Without it, all ranks have to have the same values, as from one seed or one checkpoint.
        check_inputs: In each forward, compare the bits of values that must be the same on all ranks: inputs of the
            model, and of divided layers that take full inputs. A difference is a `DivergenceError` with the module, the
            first place, and each rank's value there. For one run, not for all: it reads all of them once more, and
            waits for the ranks at each of these layers.
        check_replicas_every: After how many forwards with gradients to compare the replicated parameters,
            for example of norms, beginning with the first; 0 is never. None is the value of
            `SCALE_CHECK_REPLICAS_EVERY`, or 100 on the CPU and with `torch.use_deterministic_algorithms`;
            elsewhere replicas drift by rounding, and are not compared. A difference is a `DivergenceError`.

    Returns:
        The model.

    Raises:
        TypeError: An argument or a style is none, or the module that it is for can't be divided.
        ValueError: The plan does not fit the model, or the ranks differ; nothing has been changed then.

    Example:
        parallelize(model, {"layers.*.up": "colwise", "layers.*.down": "rowwise"}, mesh["tensor"])

    Examples:
        >>> import torch, scale_tp
        >>> class MLP(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.up, self.down = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        ...     def forward(self, x):
        ...         return self.down(torch.nn.functional.gelu(self.up(x)))
        >>> model = scale_tp.parallelize(MLP(), {"up": "colwise", "down": "rowwise"})
        >>> model(torch.ones(2, 8)).shape
        torch.Size([2, 8])

    See also: [the guide to existing models](../guides/tensor-parallel.md#existing-models-parallelize).
    """
    refuse_inference_mode("parallelize")
    plan = cast(Plan, {"": plan}) if is_style(plan) else cast(Plan | None, plan)
    validation.check_arguments(model, plan, attention_rules)
    ranks = tensor_parallel_group(process_group)
    check_size("overlap_pieces", 1 if overlap_pieces is None else overlap_pieces, 1)
    check_every = check_interval(check_replicas_every)
    is_asked_for = check_replicas_every is not None or EVERY_VARIABLE in os.environ
    is_model_plan = plan is None
    plan = _model_plan(model) if plan is None else plan
    modules = dict(model.named_modules())
    if is_model_plan:
        check_model_plan(type(model).__name__, plan, modules)
    styles = resolve_styles(plan, modules, needs_all=not is_model_plan)
    if is_model_plan:
        validation.check_layers_divided(model, styles)
    rules = (*attention_rules, *ATTENTION_RULES)
    built = _build_plan(model, styles, ranks, sequence_parallel, overlap_pieces, rules)
    check_same_call("parallelize", f"{built.signature()}; {check_inputs=}, {check_every=}", ranks, each_time=True)
    if ranks.size > 1:
        if sync_module_states:
            _broadcast_values(model, ranks)
        built.apply()
        if check_inputs:
            register_input_checks(built.modules_with_whole_inputs(), ranks)
        model.register_forward_pre_hook(OptimizerStepCheck(ranks))
        if check_every:
            replica_check = ReplicaCheck(ranks, check_every, only_reproducible=not is_asked_for)
            model.register_forward_pre_hook(replica_check)
    if ranks.rank == 0:
        kinds = Counter(conversion.mixin.__name__ for conversion in built.conversions)
        number = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        region = "" if built.region is None else f"; a part of the sequence on each rank in '{built.region.path}'"
        _logger.info("parallelize of %s: %s over %d ranks%s", type(model).__name__, number, ranks.size, region)
    return model


def _model_plan(model: nn.Module) -> Plan:
    """The plan that a model of transformers carries, with the plans of the models in it."""
    plan = getattr(model, "_tp_plan", None)
    if not isinstance(plan, Mapping) or not plan:
        raise ValueError(
            f"{type(model).__name__} carries no plan (_tp_plan): pass one, such as "
            '{"layers.*.up": "colwise", "layers.*.down": "rowwise"}, or '
            "for the GPT-2 of transformers scale_tp.GPT2_PLAN"
        )
    return plan


@torch.no_grad()
def _broadcast_values(model: nn.Module, group: Group) -> None:
    """Gives all ranks the parameters and buffers of the first one, but those that are parts already."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and shard_of(tensor) is None:
            sent = tensor.detach().contiguous()
            broadcast(sent, group).wait()
            tensor.copy_(sent)


@dataclass(frozen=True)
class _ReplacedParameter:
    """A full parameter that is no longer the model's, by its name: an optimizer that was built before still has it."""

    names: list[str]


@dataclass
class _ConversionPlan:
    """All that is to be done to a model."""

    model: nn.Module
    group: Group
    conversions: list[Conversion]
    heads: list[Heads]
    shared_inputs: dict[str, SharedInput]  # by the name of the module that holds the readers
    region_rngs: dict[str, RegionRNG]  # in the same way
    region: SequenceRegion | None
    overlap_pieces: int | None

    def signature(self) -> str:
        """The values that have to be the same on all ranks."""
        overlaps = "" if self.overlap_pieces is None else f", overlap_pieces={self.overlap_pieces}"
        parts = [f"{len(self.conversions)} modules, {'' if self.region is None else 'sequence parallel'}{overlaps}"]
        for conversion in self.conversions:
            dtypes = [param.dtype for param in conversion.module.parameters(recurse=False)]
            parts.append(f"{conversion.path} as {conversion.mixin.__name__} of {dtypes}: {conversion.shardings}")
        return "; ".join(parts)

    def modules_with_whole_inputs(self) -> dict[str, nn.Module]:
        """The model, and the divided layers whose inputs are the same on all ranks, by name."""
        return {"": self.model} | {
            conversion.path: conversion.module
            for conversion in self.conversions
            if conversion.mixin in _TAKE_WHOLE_INPUTS
            and (self.region is None or not self.region.contains(conversion.path))
        }

    def connect_siblings(self) -> None:
        """Gives the linear layers of one module what they share: their input, and the state of random numbers.

        Column parallel layers that the same module holds read one input; between them and the row parallel ones dropout
        draws numbers of this rank's own.
        """
        columns = [conversion for conversion in self.conversions if conversion.mixin is ColumnParallelMixin]
        num_readers = Counter(conversion.parent for conversion in columns)
        for column in columns:
            parent = column.parent
            if parent not in self.shared_inputs:
                mode = _input_mode(column, self.region)
                self.shared_inputs[parent] = SharedInput(self.group, num_readers[parent], mode, self.overlap_pieces)
            column.attributes["shared_input"] = self.shared_inputs[parent]
            if not column.attributes["gather_output"] and may_drop(self.model.get_submodule(parent)):
                self.region_rngs.setdefault(parent, RegionRNG(self.group))
        for conversion in self.conversions:
            if conversion.mixin is RowParallelMixin:
                conversion.attributes["overlap_pieces"] = self.overlap_pieces
            if conversion.mixin in (ColumnParallelMixin, RowParallelMixin):
                conversion.attributes["region_rng"] = self.region_rngs.get(conversion.parent)

    def apply(self) -> None:
        """Divides everything; tied parameters stay tied."""
        head_attributes = [heads.local_attributes(self.group.rank) for heads in self.heads]
        parts: dict[Tensor, nn.Parameter] = {}
        for conversion in self.conversions:
            params = dict(conversion.module.named_parameters(recurse=False))
            swap_class(conversion.module, conversion.mixin, self.group, conversion.shardings, **conversion.attributes)
            for name, param in params.items():
                sharding = conversion.shardings[name]
                if sharding.split is None:
                    continue
                if param not in parts:
                    register_replaced(param, _ReplacedParameter([f"{conversion.path}.{name}"]), 0)
                    parts[param] = local_parameter(param, sharding, self.group)
                conversion.module.register_parameter(name, parts[param])
        for heads, attributes in zip(self.heads, head_attributes, strict=True):
            for name, value in attributes.items():
                setattr(heads.module, name, value)
        for path, rng in self.region_rngs.items():
            module = self.model.get_submodule(path)
            module.register_forward_pre_hook(rng.pre_forward)
            module.register_forward_hook(rng.post_forward, always_call=True)
        for path, shared in self.shared_inputs.items():
            if shared.num_readers > 1:
                self.model.get_submodule(path).register_forward_hook(shared.reset, always_call=True)
        if self.region is not None:
            install_sequence_region(self.model, self.region, self.group, self.overlap_pieces)
        check_first_forward(self.model, self.group)
        if self.group.backend != "fake":
            self.model.register_forward_hook(FailedPass(self.group), always_call=True)
        # Other parameters are the same on all ranks, which norms of gradients and checkpoints have to know.
        for param in self.model.parameters():
            if shard_of(param) is None:
                set_shard(param, ParamSharding(tuple(param.shape)).shard_spec(self.group))


def _build_plan(
    model: nn.Module,
    all_styles: dict[str, Style],
    ranks: Group,
    sequence_parallel: bool,
    overlap_pieces: int | None,
    rules: tuple[AttentionRule, ...],
) -> _ConversionPlan:
    """Checks everything, and changes nothing."""
    modules = dict(model.named_modules())
    styles = {path: style for path, style in all_styles.items() if style != Style("nothing")}
    validation.check_groups(modules, ranks)
    validation.check_divisible(modules, styles)
    validation.check_adapters(modules, styles)
    heads = find_all_heads(modules, styles, ranks, rules)
    splits = {path: weight_split(path, modules[path], style, ranks, heads) for path, style in styles.items()}
    validation.check_key_values(modules, styles, heads)
    region = find_sequence_region(model, modules, styles) if sequence_parallel else None

    def in_region(path: str) -> bool:
        return region is not None and region.contains(path)

    validation.check_sequence_styles(styles, in_region)
    validation.check_output_reductions(
        styles, lambda path: region is not None and region.contains(path) and path not in region.gathering
    )
    converted = styles if region is None else {**region.replicated, **styles}
    conversions = [
        conversion_for(path, module, converted[path], splits.get(path), in_region(path))
        for path, module in modules.items()
        if path in converted
    ]
    validation.check_producer_splits(conversions, converted, heads)
    validation.check_tied_params(model, conversions)
    if ranks.size > 1:
        validation.check_memory(model, conversions)
    validation.check_partial_outputs(styles)
    for heads_of_module in heads.values():
        heads_of_module.local_attributes(ranks.rank)  # Raises if an attribute differs from its rule.
    validation.check_unstyled_siblings(modules, all_styles, heads)
    built = _ConversionPlan(model, ranks, conversions, list(heads.values()), {}, {}, region, overlap_pieces)
    built.connect_siblings()
    return built


def _input_mode(conversion: Conversion, region: SequenceRegion | None) -> Literal["copy", "gather", "inside"]:
    """How an input comes into the divided region (see `SharedInput`)."""
    if region is None or not region.contains(conversion.path):
        return "copy"
    return "inside" if conversion.parent in region.gathering else "gather"
