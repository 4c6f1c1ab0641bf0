"""Small models of transformers with random weights, and a step of training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from shard_arguments import shard_arguments
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    CLIPConfig,
    CLIPModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from scale_fsdp import class_policy, fully_shard_modules, no_split_policy

VOCABULARY = 101  # odd, so that its rows do not divide evenly
LENGTH = 7


def llama(**more: Any) -> LlamaForCausalLM:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**{**_decoder(), **sizes, **more}))


def gpt2() -> GPT2LMHeadModel:
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=16, n_layer=2, n_head=2, **quiet))


def t5(**more: Any) -> T5ForConditionalGeneration:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCABULARY, dropout_rate=0.0, decoder_start_token_id=0, **sizes, **more)
    )


def mixtral() -> MixtralForCausalLM:
    """One expert per token: most batches leave some of the four unused."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return MixtralForCausalLM(MixtralConfig(**_decoder(), **experts, **heads))


def qwen3_moe() -> Qwen3MoeForCausalLM:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 24}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**_decoder(), **experts, **heads))


def albert() -> AlbertForMaskedLM:
    """One layer, which is run three times."""
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"embedding_size": 8, "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    return AlbertForMaskedLM(
        AlbertConfig(vocab_size=VOCABULARY, intermediate_size=24, max_position_embeddings=32, **sizes, **quiet)
    )


def clip() -> CLIPModel:
    """Two models beside each other, and a scalar."""
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": VOCABULARY, "max_position_embeddings": 16, **sizes}
    return CLIPModel(
        CLIPConfig(text_config=text, vision_config={"image_size": 8, "patch_size": 4, **sizes}, projection_dim=8)
    )


def t5_in_two_dtypes() -> T5ForConditionalGeneration:
    """As T5 is loaded in half precision: one projection of each block stays in fp32."""
    model = t5().to(torch.bfloat16)
    for name, module in model.named_modules():
        if name.endswith("wo"):
            module.float()
    return model


def _decoder() -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2}


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "gpt2": gpt2,
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "albert": albert,
    "clip": clip,
    "t5": t5,
    "t5 in two dtypes": t5_in_two_dtypes,
    "t5 untied": lambda: t5(tie_word_embeddings=False),
    "mixtral": mixtral,
    "qwen3 moe": qwen3_moe,
}


def build(name: str) -> PreTrainedModel:
    """The same weights on every rank."""
    torch.manual_seed(11)
    model = MODELS[name]()
    model.train()
    return model


def build_plain(name: str) -> nn.Module:
    """The plain model; each block of T5 has an alias of each of its inputs, as a unit has."""
    plain = build(name)
    if not name.startswith("t5"):
        return plain

    def alias(value: Any) -> Any:
        return value.view_as(value) if isinstance(value, Tensor) and value.requires_grad else value

    def before_forward(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(map(alias, args)), {name: alias(value) for name, value in kwargs.items()}

    for module in plain.modules():
        if type(module).__name__ in plain._no_split_modules:
            module.register_forward_pre_hook(before_forward, with_kwargs=True)
    return plain


def sharded(plain: nn.Module, **kwargs: Any) -> nn.Module:
    """A copy whose blocks are units, as the model itself names them; Albert names none."""
    model = copy.deepcopy(plain)
    policy = class_policy("AlbertLayer") if isinstance(plain, AlbertForMaskedLM) else no_split_policy(model)
    return fully_shard_modules(model, policy, **shard_arguments(**kwargs))


def tokens(*seed: int, size: int = 2, length: int = LENGTH) -> Tensor:
    """int64 [size, length], the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(hash(seed) % 2**31)
    return torch.randint(3, VOCABULARY, (size, length), generator=generator)


def language_step(model: nn.Module, rank: int, number: int) -> Tensor:
    """The loss of one rank in one step, a scalar."""
    data = tokens(rank, number)
    if isinstance(model, CLIPModel):
        images = torch.randn(len(data), 3, 8, 8, generator=torch.Generator().manual_seed(10 * number + rank))
        pairs: Tensor = model(input_ids=data, pixel_values=images, return_loss=True).loss
        return pairs
    loss: Tensor = model(input_ids=data, labels=data).loss
    return loss
