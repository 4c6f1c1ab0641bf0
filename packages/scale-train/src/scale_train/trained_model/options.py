"""The command lines of `scale-train ppl` and `export`; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional


@dataclass(frozen=True)
class PplOptions:
    """Say how well a trained model predicts a text: loss per token, perplexity, bits per byte."""

    model: Positional[Path]
    """Folder of a run, one of its checkpoints, or the folder of a model of Hugging Face."""
    text: tuple[Path, ...]
    """Files or folders of text, or JSON lines (.jsonl). It reads all of them."""
    text_field: str = "text"
    """Field with the text in each object of a JSON-lines file."""
    tokenizer: str | None = None
    """byte, or a tokenizer.json (or its folder); by default the tokenizer of the run, or of the model's folder."""
    sequence: int | None = None
    """Tokens in a window. By default as in the run, otherwise the model's number of positions, at most 1024."""
    batch: int = 8
    """Windows in a forward pass."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto is cuda if there is a GPU, otherwise cpu."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True)
class ExportOptions:
    """Write the model of a run of `scale-train lm --model` as a folder that from_pretrained of transformers reads."""

    run: Positional[Path]
    """Folder of a run, or one of its checkpoints."""
    folder: Positional[Path]
    """New folder to write."""
    tokenizer: str | None = None
    """Path of the run's tokenizer.json, if it has moved."""
