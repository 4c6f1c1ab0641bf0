"""Values derived from options without torch: the shape of the model, and numbers of bytes."""

from __future__ import annotations

import re

from scale_train.huggingface.config import attention_width_in, read_config, shape_in
from scale_train.model_config import SIZES, ModelConfig, ModelSize
from scale_train.options import Options
from scale_train.tokenizer import open_tokenizer, tokenizer_of


def model_shape(options: Options) -> ModelSize:
    """Returns layers, width and heads; 0 for what a config of transformers does not say."""
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
    asked = options.model
    shape = SIZES.get(asked.size)
    if shape is None:
        raise ValueError(f"--size {asked.size}: no such size; there are {', '.join(SIZES)}")
    vocabulary = open_tokenizer(tokenizer_of(options)).vocabulary
    try:
        return ModelConfig(
            layers=shape.layers if asked.layers is None else asked.layers,
            width=shape.width if asked.width is None else asked.width,
            heads=shape.heads if asked.heads is None else asked.heads,
            vocabulary=vocabulary,
            tied=not asked.untied_embeddings,
            dropout=asked.dropout,
            loss_chunk=asked.loss_chunk,
            experts=asked.experts,
            top_k=asked.top_k,
            shared_experts=asked.shared_experts,
            capacity_factor=asked.capacity_factor,
            aux_loss_coef=asked.aux_loss_coef,
        )
    except ValueError as error:
        raise ValueError(f"--size {asked.size} with --layers, --width, --heads: {error}") from error


def budget_bytes(choice: str) -> int | None:
    """Returns the bytes of `--checkpoint-activations budget:2GiB`; None for another choice."""
    return bytes_of(choice.removeprefix("budget:")) if choice.startswith("budget:") else None


def bytes_of(text: str) -> int | None:
    """Returns a number of bytes, as 5GB or 2GiB; None for another text."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]i?B|B)", text)
    if found is None:
        return None
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    return int(float(found[1]) * units[found[2]])
