"""The `config.json` of a model of transformers: the fields that are read without transformers and torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scale_train.model.config import ModelSize

_NAMES = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "width": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "positions": ("max_position_embeddings", "n_positions"),
}
WEIGHTS = ("model.safetensors.index.json", "model.safetensors")


def config_file(path: Path) -> Path:
    """Returns the file of `--model`: it, or the one in a folder."""
    return path / "config.json" if path.is_dir() else path


def read_config(path: Path) -> dict[str, Any]:
    """Returns the content of a config of transformers; a ValueError where it is none."""
    try:
        content = json.loads(config_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--model {path}: cannot be read ({error.strerror}); name a config.json of transformers, or its folder"
        ) from error
    except ValueError as error:
        raise ValueError(f"--model {path}: no config of transformers: {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ValueError(f"--model {path}: no config of transformers: it has no model_type")
    return content


def number_in(config: dict[str, Any], what: str) -> int | None:
    """Returns layers, width, heads or positions by the name that a model has for it; None where it has none."""
    number = next((config[name] for name in _NAMES[what] if isinstance(config.get(name), int)), None)
    return None if number is None else int(number)


def shape_in(config: dict[str, Any]) -> ModelSize:
    """Returns the shape; 0 for a number that the config does not have."""
    return ModelSize(*(number_in(config, size_name) or 0 for size_name in ("layers", "width", "heads")))


def has_weights(path: Path) -> bool:
    """Whether `--model` names a folder with weights."""
    return path.is_dir() and any((path / name).exists() for name in WEIGHTS)


def attention_width_in(config: dict[str, Any]) -> int:
    """Returns heads times the features of each; 0 where the config does not say it."""
    shape, features = shape_in(config), config.get("head_dim")
    return shape.heads * features if isinstance(features, int) else shape.width


def is_mixture(config: dict[str, Any]) -> bool:
    """Whether a token passes through a part of the parameters alone."""
    return any(isinstance(value, int) and value > 1 for name, value in config.items() if "experts" in name)
