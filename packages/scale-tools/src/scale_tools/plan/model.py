"""What is planned: a model by name or numbers, by a config of transformers, or by a function of the user's own."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from scale_core.comm.group import Group, GroupLike
from scale_fsdp import class_policy, no_split_policy
from scale_fsdp.wrapping.policy import Policy
from scale_tools.plan.options import PlanOptions
from scale_tools.plan.strategies import NAMED_BLOCKS
from scale_tp.attention_heads import AttentionRule
from scale_tp.conversion.styles import Plan
from scale_train.configuration.resolve import model_config
from scale_train.errors import InputError
from scale_train.huggingface.model import transformers_config
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT, Block
from scale_train.options import ModelOptions, Options
from scale_train.training.parallel.parallelize_gpt import ATTENTION_RULE, tensor_plan
from scale_train.training.parallel.pipeline_gpt import stage_boundaries

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""Of a model, tokens `[batch, sequence]` and targets of the same shape, both int64: a scalar."""


class Built(NamedTuple):
    """A model and its loss."""

    model: nn.Module
    loss: Loss


@dataclass(frozen=True)
class PlannedModel:
    """A model to plan for.

    Attributes:
        title: What it is called in print.
        build: Makes it, on the device of the context.
        blocks: Which of its modules are sharded and recomputed one by one.
        tensor_plan: How tensor parallelism divides it; None is the plan that a model of transformers carries.
        attention_rules: What tensor parallelism has to know of its attention.
        size: The name by which `scale-train lm` knows it; None for other models.
        policy: What to write for its blocks in Python.
        build_over: Makes it with experts, which these ranks divide and route together; None where it has none.
    """

    title: str
    build: Callable[[], Built]
    blocks: Callable[[nn.Module], Policy]
    tensor_plan: Plan | None
    attention_rules: tuple[AttentionRule, ...] = ()
    size: str | None = None
    policy: str = NAMED_BLOCKS
    build_over: Callable[[GroupLike], Built] | None = None

    def cuts(self, model: nn.Module, num_stages: int) -> list[str] | None:
        """Returns the names of the modules at which stages of a pipeline begin; None where nothing says so."""
        return stage_boundaries(len(model.blocks), num_stages) if isinstance(model, GPT) else None


def planned_model(options: PlanOptions) -> PlannedModel:
    """Returns what options name; an InputError where they name nothing, or two things."""
    if options.config is not None and options.factory is not None:
        raise InputError("--config and --factory: one model is planned at a time; take one of them")
    if options.config is not None or options.factory is not None:
        _check_no_sizes(options)
    if options.factory is not None:
        return _from_factory(options.factory)
    if options.config is not None:
        return _from_transformers(options.config)
    asked = ModelOptions(
        options.size,
        options.layers,
        options.width,
        options.heads,
        experts=options.experts,
        top_k=options.top_k,
        loss_chunk=options.loss_chunk,
    )
    config = replace(model_config(Options(model=asked)), vocabulary=options.vocabulary)
    title = f"GPT of {config.layers} blocks, width {config.width}, {config.heads} heads, {config.vocabulary} tokens"
    title += f", {config.experts} experts of which a token has {config.top_k}" if config.experts else ""

    def build(mesh: GroupLike = Group()) -> Built:  # noqa: B008  # immutable
        return Built(GPT(config, mesh), _returned_loss)

    return PlannedModel(
        title,
        build,
        lambda _: class_policy(Block),
        tensor_plan(config),
        (ATTENTION_RULE,),
        size=options.size if options.vocabulary == ModelConfig.vocabulary else None,
        build_over=build if config.experts else None,
    )


def _check_no_sizes(options: PlanOptions) -> None:
    """Refuses options of models by name beside another model, where they would have no effect."""
    defaults, source = PlanOptions(), "--config" if options.config is not None else "--factory"
    for name in ("size", "layers", "width", "heads", "vocabulary", "loss_chunk", "experts", "top_k", "expert_parallel"):
        if getattr(options, name) != getattr(defaults, name):
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} is for models by name, and {source} gives another one; leave one of them out")


def _from_transformers(path: Path) -> PlannedModel:
    file = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        kind = content["model_type"]
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}; a config.json of transformers is needed") from error
    except (ValueError, TypeError, KeyError) as error:
        raise InputError(f"--config {path}: no config of transformers: it has no model_type") from error
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise InputError("--config: transformers is not installed: pip install transformers") from error
    try:
        config = transformers_config(content)
        config.use_cache = False
    except ValueError as error:
        raise InputError(f"--config {path}: {error}") from error

    def loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        found: Tensor = model(input_ids=tokens, labels=targets).loss
        return found

    def build() -> Built:
        make: Any = AutoModelForCausalLM.from_config  # not annotated
        model: nn.Module = make(config, dtype=torch.float32)
        return Built(model.train(), loss)

    return PlannedModel(f"{kind} of {file}", build, no_split_policy, None, policy="scale_fsdp.no_split_policy(model)")


def _returned_loss(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    found: Tensor = model(tokens, targets)
    return found


def _from_factory(name: str) -> PlannedModel:
    place, _, function = name.partition(":")
    try:
        made_by: Any = getattr(importlib.import_module(place), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(
            f"--factory {name}: expected package.module:function, which can be imported: {error}"
        ) from error

    def build() -> Built:
        made = made_by()
        model, loss = made if isinstance(made, tuple) else (made, _returned_loss)
        if not isinstance(model, nn.Module):
            raise InputError(f"--factory {name}: expected a torch.nn.Module, got {type(model).__name__}")
        return Built(model, loss)

    return PlannedModel(name, build, _listed_blocks, None, policy="scale_fsdp.class_policy(Block)")


def _listed_blocks(model: nn.Module) -> Policy:
    """The classes that a model names as its blocks, or the classes in its longest list of modules."""
    if getattr(model, "_no_split_modules", None):
        return no_split_policy(model)
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not lists:
        raise InputError(
            f"--factory: nothing says which modules of {type(model).__name__} are its blocks: put them into an "
            "nn.ModuleList, or name their classes in _no_split_modules of the model"
        )
    return class_policy(*sorted({type(block).__name__ for block in max(lists, key=len)}))
