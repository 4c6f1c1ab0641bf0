"""A trained model, read from a run, a checkpoint or a folder of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import scale_snapshot
from scale_core.comm.group import Group
from scale_snapshot import SnapshotError, latest_snapshot, load_pretrained
from scale_snapshot.format.metadata import read_manifest
from scale_snapshot.format.state_codec import decode_extra
from scale_snapshot.pretrained.materialize import materialize
from scale_snapshot.read_lock import ReadLock
from scale_train.data.tokenizer import BYTE, Tokenizer, open_tokenizer, tokenizer_file
from scale_train.errors import InputError
from scale_train.huggingface.config import has_weights, number_in, read_config
from scale_train.huggingface.model import build_on_meta
from scale_train.model.config import ModelConfig
from scale_train.model.gpt import GPT
from scale_train.training.checkpoint import CHECKPOINTS, PROGRAM

_MOST_POSITIONS = 1024  # of a window, where nothing says how long one is


@dataclass(frozen=True)
class TrainedModel:
    """A model as it was saved."""

    model: nn.Module  # in evaluation mode, on the host
    tokenizer: str
    tokenizer_sha256: str | None  # "" for bytes; None where it is not known
    sequence: int  # tokens in a window, unless another number is asked for
    vocabulary: int | None
    positions: int | None  # None where the model has no last one
    source: Path | None  # what --model named
    title: str  # for messages

    def open_tokenizer(self, asked: str | None) -> Tokenizer:
        """Returns the tokenizer that was asked for, or the model's own; an InputError where it is not the model's."""
        try:
            tokenizer = open_tokenizer(asked or self.tokenizer)
        except ValueError as error:
            raise InputError(f"{error}; name the tokenizer of {self.title} with --tokenizer") from error
        if self.tokenizer_sha256 is not None and tokenizer.sha256 != self.tokenizer_sha256:
            raise InputError(
                f"--tokenizer {tokenizer.name}: {self.title} was trained with another one: {self.tokenizer}, as it was "
                "then (by its SHA-256)"
            )
        if self.vocabulary is not None and tokenizer.vocabulary > self.vocabulary:
            raise InputError(
                f"--tokenizer {tokenizer.name}: it has {tokenizer.vocabulary} tokens, and {self.title} knows "
                f"{self.vocabulary}; name the tokenizer of the model"
            )
        return tokenizer

    def check_sequence(self, sequence: int) -> None:
        """Raises InputError where the model has fewer positions."""
        if self.positions is not None and sequence > self.positions:
            raise InputError(
                f"--sequence {sequence}: {self.title} has {self.positions} positions; take at most {self.positions}"
            )


def open_trained_model(path: Path) -> TrainedModel:
    """Loads the model of a run, a checkpoint or a folder of Hugging Face; an InputError where it is none of them."""
    if not path.exists():
        raise InputError(f"{path}: no such folder")
    try:
        if has_weights(path):
            return _of_folder(path)
        point = latest_snapshot(path / CHECKPOINTS) if (path / CHECKPOINTS).is_dir() else path
        if point is None or not point.name.removeprefix("step-").isdecimal():
            raise InputError(f"{path}: neither a run, nor a checkpoint (step-N), nor a folder with model.safetensors")
        with ReadLock(point):  # The run may go on, and remove it.
            return _of_checkpoint(point)
    except InputError:
        raise  # It names the path.
    except SnapshotError as error:
        raise InputError(f"{path}: {error.__cause__ or error}") from error
    except (ValueError, FileNotFoundError) as error:
        raise InputError(f"{path}: {error}") from error


def _of_folder(path: Path) -> TrainedModel:
    config = read_config(path)
    model = build_on_meta(config)
    load_pretrained(model, path, device="cpu", cast=True, process_group=Group())
    tokenizer = str(path) if tokenizer_file(path).exists() else BYTE
    positions = number_in(config, "positions")
    sequence = min(positions or _MOST_POSITIONS, _MOST_POSITIONS)
    vocabulary = config.get("vocab_size")
    return TrainedModel(model.eval(), tokenizer, None, sequence, vocabulary, positions, path, str(path))


def _of_checkpoint(point: Path) -> TrainedModel:
    extra: Any = decode_extra(read_manifest(point).extra)
    if not isinstance(extra, dict) or extra.get("program") != PROGRAM:
        raise InputError(f"{point}: a checkpoint of another program than {PROGRAM}")
    model: nn.Module
    facts, positions = extra["model"], None
    if "model_type" in facts:
        model, positions = build_on_meta(facts), number_in(facts, "positions")
        rule: Any = model._init_weights
        materialize(model, torch.device("cpu"), rule, set())
    else:
        model = GPT(ModelConfig(**facts))
    step = int(point.name.removeprefix("step-"))
    scale_snapshot.load(point.parent, {"model": model}, step=step, only_given=True, process_group=Group())
    return TrainedModel(
        model.eval(),
        extra.get("tokenizer", BYTE),
        extra.get("tokenizer_sha256"),
        extra["data"]["sequence"],
        facts.get("vocab_size", facts.get("vocabulary")),
        positions,
        Path(extra["model_source"]) if extra.get("model_source") else None,
        str(point),
    )
