"""Values for a model on the meta device: of the stages of a rank, or of each module that is sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import nn

from scale_core.parameters import copy_attributes
from scale_train.huggingface.model import TransformersSource
from scale_train.model.gpt import GPT


def materialize_stages(model: GPT, stages: Iterable[nn.Module], device: torch.device) -> None:
    """Allocates and initializes stages of a model on the meta device; a tied weight stays one tensor."""
    replacements: dict[nn.Parameter, nn.Parameter] = {}
    for module in (module for stage in stages for module in stage.modules()):
        on_meta = [(name, param) for name, param in module._parameters.items() if param is not None and param.is_meta]
        for name, param in on_meta:
            if param not in replacements:
                replacements[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                copy_attributes(param, replacements[param])
            module.register_parameter(name, replacements[param])  # Of experts, it stays a shard.
        if on_meta:
            model.init_weights(module)


def init_of(model: nn.Module, source: TransformersSource | None) -> Callable[[nn.Module], None] | Literal[False]:
    """What initializes the modules of a model on the meta device; False where weights are loaded afterwards."""
    if source is None:
        assert isinstance(model, GPT)
        return model.init_weights
    return False if source.has_weights else source.initializer(model)
