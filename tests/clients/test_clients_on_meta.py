"""Models of transformers that are never whole: built on the meta device, and initialized unit by unit."""

from __future__ import annotations

import pytest
import torch
from client_models import MODELS, build_plain, train_beside

from scale_core.comm.group import group_of
from scale_core.testing import run_ranks
from scale_fsdp import fully_shard_modules, no_split_policy

NAMES = ["gpt2", "llama", "llama tied", "t5", "mixtral"]


def trains(name: str) -> list[str]:
    torch.manual_seed(group_of().rank)
    with torch.device("meta"):
        model = MODELS[name]()
    model.train()
    fully_shard_modules(model, no_split_policy(model), init=model._init_weights)
    plain = build_plain(name)
    plain.load_state_dict(model.state_dict())
    buffers = dict(plain.named_buffers())
    wrong = [name for name, buffer in model.named_buffers() if not torch.equal(buffer, buffers[name])]
    return wrong + train_beside(plain, model, steps=2)


def all_train() -> list[str]:
    return [f"{name}: {line}" for name in NAMES for line in trains(name)]


def test_models_initialized_on_meta_train_as_plain_ones_with_the_same_weights() -> None:
    assert not any(run_ranks(all_train, 2))


def test_a_model_that_hides_its_initialization_is_told_what_to_pass() -> None:
    with torch.device("meta"):
        model = MODELS["llama"]()
    with pytest.raises(ValueError, match=r"'model.layers.0.input_layernorm.weight' is on the meta device.*pass init="):
        fully_shard_modules(model, no_split_policy(model))
