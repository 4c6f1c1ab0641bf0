"""What programs do with a model of transformers beside calling it: right, or an error that names what to write."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from client_models import build, sharded, tokens
from torch import nn
from trainings import assert_parity, recorded

from scale_core.testing import run_ranks
from scale_fsdp import fully_shard, fully_shard_modules, no_split_policy


def resize(model: nn.Module) -> None:
    model.resize_token_embeddings(120, mean_resizing=False)
    model(input_ids=tokens(0))


def untie(model: nn.Module) -> None:
    model.lm_head = nn.Linear(16, 101, bias=False)
    model(input_ids=tokens(0))


def tie(model: nn.Module) -> None:
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model(input_ids=tokens(0))


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str, str]] = {
    "inner model": (lambda model: model.model(input_ids=tokens(0)), "llama", "a Embedding of the root unit was called"),
    "embedding": (lambda model: model.get_input_embeddings()(tokens(0)), "gpt2", "call the GPT2LMHeadModel itself"),
    "head": (lambda model: model.lm_head(torch.zeros(1, 16)), "llama", "a Linear of the root unit was called"),
    "encoder": (lambda model: model.encoder(input_ids=tokens(0)), "t5", "a Embedding of the root unit was called"),
    "forward": (lambda model: model.forward(input_ids=tokens(0)), "llama", "call the LlamaForCausalLM itself"),
    "resize": (
        resize,
        "llama tied",
        "setitem of 'model.embed_tokens.weight' [101, 16]: it needs elements that other ranks have",
    ),
    "tie": (tie, "llama", "was replaced by a different tensor"),
    "new head": (untie, "llama tied", "'lm_head.weight' was put into the root unit after that was sharded"),
}


@pytest.mark.parametrize("how", REFUSED)
@pytest.mark.ranks(2)
def test_what_would_use_shards_is_refused_by_name(how: str) -> None:
    """After the error the model still trains, unless it holds what is refused."""
    call, name, words = REFUSED[how]
    model = sharded(build(name))
    with pytest.raises(RuntimeError, match=re.escape(words)):
        call(model)
    if how != "new head":
        model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
        assert all(param.grad is not None for param in model.parameters())


@torch.no_grad()
def inner_model_as_a_unit() -> None:
    plain, model = build("llama tied").eval(), build("llama tied").eval()
    fully_shard_modules(model.model, no_split_policy(model))
    fully_shard(model)
    hidden = plain.model(input_ids=tokens(0)).last_hidden_state
    assert torch.equal(model.model(input_ids=tokens(0)).last_hidden_state, hidden)
    assert torch.equal(model(input_ids=tokens(0)).logits, plain(input_ids=tokens(0)).logits)


@torch.no_grad()
def embedding_as_a_unit() -> None:
    model = build("llama").eval()
    expected = model.get_input_embeddings()(tokens(0))
    fully_shard(model.get_input_embeddings())
    fully_shard(model)
    assert torch.equal(model.get_input_embeddings()(tokens(0)), expected)


@torch.no_grad()
def inner_model_of_full_parameters() -> None:
    plain, model = build("llama tied").eval(), sharded(build("llama tied").eval())
    with model.summon_full_params():
        hidden = model.model(input_ids=tokens(0)).last_hidden_state
    assert torch.equal(hidden, plain.model(input_ids=tokens(0)).last_hidden_state)


def resized_before_sharding() -> None:
    plain = build("llama tied")
    plain.resize_token_embeddings(120, mean_resizing=False)
    model = sharded(plain)
    assert_parity(recorded([0.0], plain.state_dict()), [recorded([0.0], model.state_dict())], rel=0.0)
    model(input_ids=tokens(0) + 15, labels=tokens(0)).loss.backward()


def attributes_that_transformers_reads() -> None:
    model = sharded(build("llama"))
    assert (model.dtype, model.device, model.config.vocab_size) == (torch.float32, torch.device("cpu"), 101)
    assert isinstance(model, type(build("llama")))
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.float32


@pytest.mark.parametrize(
    "use",
    [
        inner_model_as_a_unit,
        embedding_as_a_unit,
        inner_model_of_full_parameters,
        resized_before_sharding,
        attributes_that_transformers_reads,
    ],
)
def test_the_ways_that_the_errors_name_are_right(use: Callable[[], None]) -> None:
    run_ranks(use, 2)


@pytest.mark.ranks(2)
def test_a_sharded_model_is_saved_and_loaded(tmp_path: Path) -> None:
    """`save_pretrained` of a sharded model gathers on all ranks and writes on one."""
    folder = str(tmp_path)
    plain = build("llama tied")
    sharded(plain).save_pretrained(folder)
    torch.distributed.barrier()
    loaded = type(plain).from_pretrained(folder)
    for model in (loaded, sharded(loaded)):
        assert_parity(recorded([0.0], plain.state_dict()), [recorded([0.0], model.state_dict())], rel=0.0)
