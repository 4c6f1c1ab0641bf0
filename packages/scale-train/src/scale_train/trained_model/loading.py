"""A trained model, read from a run, a checkpoint or a folder of Hugging Face."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scale_core import load_pretrained, snapshot
from scale_core.comm.group import Group
from scale_core.errors import SnapshotError
from scale_core.pretrained.materialize import materialize
from scale_core.snapshot import latest_snapshot
from scale_core.snapshot.format.metadata import read_manifest
from scale_train.errors import InputError
from scale_train.model import GPT
from scale_train.model_config import ModelConfig
from scale_train.tokenizer import BYTE, tokenizer_file
from scale_train.training.checkpoint import CHECKPOINTS, PROGRAM
from scale_train.transformers_config import has_weights, number_in, read_config
from scale_train.transformers_model import build_on_meta

_MOST_POSITIONS = 1024  # of a window, where nothing says how long one is


@dataclass(frozen=True)
class TrainedModel:
    """A model as it was saved."""

    model: nn.Module  # in evaluation mode, on the host
    tokenizer: str
    sequence: int  # tokens in a window, unless another number is asked for


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
        return _of_checkpoint(point)
    except SnapshotError as error:
        raise InputError(f"{path}: {error.__cause__ or error}") from error
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error


def _of_folder(path: Path) -> TrainedModel:
    config = read_config(path)
    model = build_on_meta(config)
    load_pretrained(model, path, device="cpu", cast=True, process_group=Group())
    tokenizer = str(path) if tokenizer_file(path).exists() else BYTE
    positions = number_in(config, "positions") or _MOST_POSITIONS
    return TrainedModel(model.eval(), tokenizer, min(positions, _MOST_POSITIONS))


def _of_checkpoint(point: Path) -> TrainedModel:
    said: Any = read_manifest(point).extra
    if not isinstance(said, dict) or said.get("program") != PROGRAM:
        raise InputError(f"{point}: a checkpoint of another program than {PROGRAM}")
    model: nn.Module
    if "model_type" in said["model"]:
        model = build_on_meta(said["model"])
        rule: Any = model._init_weights
        materialize(model, torch.device("cpu"), rule, set())
    else:
        model = GPT(ModelConfig(**said["model"]))
    step = int(point.name.removeprefix("step-"))
    snapshot.load(point.parent, {"model": model}, step=step, only_given=True, process_group=Group())
    return TrainedModel(model.eval(), said.get("tokenizer", BYTE), said["data"]["sequence"])
