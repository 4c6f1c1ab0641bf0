"""Weights of transformers, in and out of fully sharded models that are never whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.mixtral.configuration_mixtral import MixtralConfig

from scale_check.exact import assert_equal
from scale_core.testing import run_ranks
from scale_fsdp import ShardOptions, fully_shard_modules, no_split_policy
from scale_snapshot import load_pretrained, save_pretrained

SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "max_position_embeddings": 32}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
NAMES = ["llama", "llama tied", "llama in bf16", "gpt2", "mixtral"]


def config_of(name: str) -> Any:
    if name == "gpt2":
        return GPT2Config(vocab_size=37, n_positions=32, n_embd=16, n_layer=2, n_head=2, n_inner=21)
    if name == "mixtral":
        return MixtralConfig(**SIZES, **HEADS, num_local_experts=3, num_experts_per_tok=1)
    return LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=name == "llama tied")


def build(name: str) -> nn.Module:
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    model: nn.Module = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype)
    return model


def publish(folder: Path) -> None:
    for name in NAMES:
        torch.manual_seed(3)
        model: Any = build(name)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
        model.save_pretrained(folder / name, max_shard_size="4KB")


def load_and_save(folder: str) -> None:
    for name in NAMES:
        with torch.device("meta"):
            model = build(name)
        fully_shard_modules(model, no_split_policy(model), options=ShardOptions(init=False))
        load_pretrained(model, f"{folder}/{name}")
        plain: Any = AutoModelForCausalLM.from_pretrained(f"{folder}/{name}")
        assert_equal(model, plain, name)
        tokens = torch.arange(10).view(2, 5)
        with torch.no_grad():
            assert torch.equal(model.eval()(tokens).logits, plain.eval()(tokens).logits), name
        save_pretrained(model, f"{folder}/{name} again", max_shard_size="4KB")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_weights_of_transformers_are_loaded_and_saved(tmp_path: Path, world: int) -> None:
    publish(tmp_path)
    run_ranks(load_and_save, world, str(tmp_path))
    for name in NAMES:
        again: Any = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/{name} again")
        first: Any = AutoModelForCausalLM.from_pretrained(f"{tmp_path}/{name}")
        assert type(again) is type(first) and again.dtype == first.dtype
        assert all(torch.equal(one, other) for one, other in zip(again.parameters(), first.parameters(), strict=True))
        names = {file.name for file in (tmp_path / name).iterdir()}
        assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= names
        for file in ("config.json", "generation_config.json"):
            assert (tmp_path / f"{name} again" / file).read_text() == (tmp_path / name / file).read_text()
