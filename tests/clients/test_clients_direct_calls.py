"""What programs do with a model of transformers beside calling it: right, or an error that names what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from client_models import build, differing, sharded, tokens
from torch import nn

from scale_core.testing import run_ranks
from scale_fsdp import fully_shard, fully_shard_modules, no_split_policy


def refused(call: Callable[[nn.Module], Any], name: str = "llama tied") -> str:
    """The error of a call; after it the model still trains, unless it holds what is refused."""
    model = sharded(build(name))
    with pytest.raises(RuntimeError) as caught:
        call(model)
    if not any(words in str(caught.value) for words in ("has got other memory", "was put into")):
        model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
        assert all(param.grad is not None for param in model.parameters())
    return str(caught.value)


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
    "tie": (tie, "llama", "another tensor stands in the place of"),
    "new head": (untie, "llama tied", "'lm_head.weight' was put into the root unit after that was sharded"),
}


def refuse_all() -> dict[str, str]:
    return {how: refused(call, name) for how, (call, name, _) in REFUSED.items()}


def allowed() -> list[str]:
    """The ways that the errors name."""
    wrong = []
    plain = build("llama tied").eval()
    hidden = plain.model(input_ids=tokens(0)).last_hidden_state
    with torch.no_grad():
        inner = build("llama tied").eval()
        fully_shard_modules(inner.model, no_split_policy(inner))  # `model.model` is a unit: it may be called.
        fully_shard(inner)
        if not torch.equal(inner.model(input_ids=tokens(0)).last_hidden_state, hidden):
            wrong.append("inner model: other numbers")
        if not torch.equal(inner(input_ids=tokens(0)).logits, plain(input_ids=tokens(0)).logits):
            wrong.append("model around it: other numbers")
        apart = build("llama").eval()
        embedding = apart.get_input_embeddings()(tokens(0))
        fully_shard(apart.get_input_embeddings())
        fully_shard(apart)
        if not torch.equal(apart.get_input_embeddings()(tokens(0)), embedding):
            wrong.append("embedding: other numbers")
        whole = sharded(build("llama tied").eval())
        with whole.summon_full_params():
            if not torch.equal(whole.model(input_ids=tokens(0)).last_hidden_state, hidden):
                wrong.append("summoned: other numbers")
    before = build("llama tied")
    before.resize_token_embeddings(120, mean_resizing=False)
    resized = sharded(before)
    wrong += differing(resized.state_dict(), before.state_dict())
    resized(input_ids=tokens(0) + 15, labels=tokens(0)).loss.backward()
    return wrong


def saved_and_loaded(folder: str) -> list[str]:
    """`save_pretrained` of a sharded model, which gathers on all ranks and writes on one; and the way back."""
    model = sharded(build("llama tied"))
    model.save_pretrained(folder)
    torch.distributed.barrier()
    loaded = type(build("llama tied")).from_pretrained(folder)
    wrong = differing(loaded.state_dict(), build("llama tied").state_dict())
    return wrong + differing(sharded(loaded).state_dict(), loaded.state_dict())


def attributes() -> list[str]:
    """What code of transformers reads of a model."""
    model = sharded(build("llama"))
    expected = {
        "dtype": (model.dtype, torch.float32),
        "device": (model.device, torch.device("cpu")),
        "class": (isinstance(model, type(build("llama"))), True),
        "config": (model.config.vocab_size, 101),
        "projection": (model.model.layers[0].self_attn.q_proj.weight.dtype, torch.float32),
    }
    return [f"{name}: {got} instead of {wanted}" for name, (got, wanted) in expected.items() if got != wanted]


def play(folder: str) -> tuple[dict[str, str], list[str]]:
    return refuse_all(), allowed() + attributes() + saved_and_loaded(folder)


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, str], list[str]]]:
    return run_ranks(play, 2, str(tmp_path_factory.mktemp("saved")))


@pytest.mark.parametrize("how", REFUSED)
def test_what_would_use_shards_is_refused_by_name(
    how: str, of_two_ranks: list[tuple[dict[str, str], list[str]]]
) -> None:
    for messages, _ in of_two_ranks:
        assert REFUSED[how][2] in messages[how]


def test_the_ways_that_are_named_and_what_others_read_are_right(
    of_two_ranks: list[tuple[dict[str, str], list[str]]],
) -> None:
    assert not any(wrong for _, wrong in of_two_ranks)
