"""Values derived from options without torch: the shape of the model, and numbers of bytes."""

from __future__ import annotations

import re

from scale_train.data.tokenizer import open_tokenizer, tokenizer_of
from scale_train.huggingface.config import attention_width_in, read_config, shape_in
from scale_train.model.config import SIZES, ModelConfig, ModelSize
from scale_train.options import Options


def model_shape(options: Options) -> ModelSize:
    """Returns layers, width and heads; 0 for a number that a config of transformers does not have."""
    if options.model.model is not None:
        return shape_in(read_config(options.model.model))
    config = gpt_config(options)
    return ModelSize(config.layers, config.width, config.heads)


def attention_width(options: Options) -> int:
    """Returns heads times the features of each; 0 where a config of transformers does not say it."""
    if options.model.model is not None:
        return attention_width_in(read_config(options.model.model))
    return gpt_config(options).width


def gpt_config(options: Options) -> ModelConfig:
    """Returns the numbers of the GPT; a ValueError where they make none."""
    model_options = options.model
    shape = SIZES.get(model_options.size)
    if shape is None:
        raise ValueError(f"--size {model_options.size}: no such size; there are {', '.join(SIZES)}")
    vocabulary = open_tokenizer(tokenizer_of(options)).vocabulary
    try:
        return ModelConfig(
            layers=shape.layers if model_options.layers is None else model_options.layers,
            width=shape.width if model_options.width is None else model_options.width,
            heads=shape.heads if model_options.heads is None else model_options.heads,
            vocabulary=vocabulary,
            tied=not model_options.untied_embeddings,
            dropout=model_options.dropout,
            loss_chunk=model_options.loss_chunk,
            experts=model_options.experts,
            top_k=model_options.top_k,
            shared_experts=model_options.shared_experts,
            capacity_factor=model_options.capacity_factor,
            aux_loss_coef=model_options.aux_loss_coef,
        )
    except ValueError as error:
        raise ValueError(f"--size {model_options.size} with --layers, --width, --heads: {error}") from error


def budget_bytes(choice: str) -> int | None:
    """Returns the bytes of `--checkpoint-activations budget:2GiB`; None for another choice."""
    return bytes_of(choice.removeprefix("budget:")) if choice.startswith("budget:") else None


def bytes_of(text: str) -> int | None:
    """Returns a number of bytes, as 5GB or 2GiB; None for another text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]i?B|B)", text)
    if match is None:
        return None
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(float(match[1]) * units[match[2]])
