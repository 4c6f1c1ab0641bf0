"""Small models with sizes that do not divide, and what they compute on one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.gpt2.configuration_gpt2 import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2LMHeadModel
from transformers.models.gpt_neox.configuration_gpt_neox import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXForCausalLM
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM


def llama(**changed: Any) -> nn.Module:
    """A Llama of transformers with random weights."""
    options: dict[str, Any] = {
        "vocab_size": 37,
        "hidden_size": 24,
        "intermediate_size": 21,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "head_dim": 4,
        "max_position_embeddings": 32,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    torch.manual_seed(5)
    return LlamaForCausalLM(LlamaConfig(**(options | changed)))


def gpt2(**changed: Any) -> nn.Module:
    """A GPT-2 of transformers with random weights, without dropout; its head is its embedding."""
    options: dict[str, Any] = {
        "vocab_size": 37,
        "n_positions": 32,
        "n_embd": 20,
        "n_layer": 2,
        "n_head": 5,
        "n_inner": 27,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_implementation": "eager",
        "use_cache": False,
    }
    torch.manual_seed(6)
    return GPT2LMHeadModel(GPT2Config(**(options | changed)))


def gpt_neox() -> nn.Module:
    """A GPT-NeoX of transformers with random weights: one projection holds all three, head by head."""
    torch.manual_seed(7)
    config = GPTNeoXConfig(
        vocab_size=37,
        hidden_size=18,
        num_hidden_layers=1,
        num_attention_heads=3,
        intermediate_size=20,
        max_position_embeddings=32,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_implementation="eager",
        use_cache=False,
    )
    model = GPTNeoXForCausalLM(config)
    for param in model.parameters():
        nn.init.uniform_(param, -0.5, 0.5)
    return model


def tokens(step: int, length: int = 7) -> Tensor:
    """The same [2, length] int64 on every rank."""
    return torch.randint(37, (2, length), generator=torch.Generator().manual_seed(step))


def loss_of(logits: Tensor, data: Tensor) -> Tensor:
    """The mean negative log likelihood of the next token."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), data[:, 1:].flatten())


def train(model: nn.Module, steps: int = 5, length: int = 7) -> list[Tensor]:
    """Trains a language model; returns the logits of each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(steps):
        data = tokens(step, length)
        logits = model(input_ids=data).logits
        found.append(logits.detach())
        optimizer.zero_grad()
        loss_of(logits, data).backward()
        optimizer.step()
    return found
