"""`scale-train ppl` and `scale-train export`, each on one process.

Exit codes: 0 done; 2 wrong input.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from scale_core import load_pretrained, snapshot
from scale_core.comm.group import Group
from scale_core.errors import SnapshotError
from scale_core.pretrained.materialize import materialize
from scale_core.snapshot import latest_snapshot
from scale_core.snapshot.format.metadata import read_manifest
from scale_train.data import read_text, windows_at
from scale_train.errors import InputError, reported
from scale_train.model import GPT
from scale_train.model_config import ModelConfig
from scale_train.tokenizer import BYTE, open_tokenizer, tokenizer_file
from scale_train.trained.options import ExportOptions, PplOptions
from scale_train.training.checkpoint import CHECKPOINTS, PROGRAM
from scale_train.transformers_config import has_weights, number_in, read_config
from scale_train.transformers_model import build_on_meta, export_model

_MOST_POSITIONS = 1024  # of a window, where nothing says how long one is


@dataclass(frozen=True)
class Trained:
    """A model as it was saved."""

    model: nn.Module  # in evaluation mode, on the host
    tokenizer: str
    sequence: int  # tokens in a window, unless another number is asked for


def ppl(options: PplOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _ppl(options))


def export(options: ExportOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _export(options))


def _ppl(options: PplOptions) -> int:
    for flag, number in (("--batch", options.batch), ("--sequence", options.sequence)):
        if number is not None and number < 1:
            raise InputError(f"{flag} {number}: at least 1 is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device that torch can use; take --device cpu")
    trained = open_trained(options.model)
    sequence = options.sequence or trained.sequence
    try:
        tokenizer = open_tokenizer(options.tokenizer or trained.tokenizer)
    except ValueError as error:
        raise InputError(str(error)) from error
    text = read_text(options.text, tokenizer, text_field=options.text_field, held_out_every=1)
    if len(text.held_out) < sequence + 1:
        raise InputError(
            f"--text {text.source}: too few tokens for --sequence {sequence}: {len(text.held_out)}, and "
            f"{sequence + 1} are needed"
        )
    on_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_cuda else "cpu")
    loss = mean_loss(trained.model.to(device), text.held_out, sequence, options.batch, device)
    found = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) * text.tokens_per_byte,
        "tokens": (len(text.held_out) - 1) // sequence * sequence,
    }
    if options.json:
        print(json.dumps(found))
    else:
        print(
            f"loss {found['loss']:.4f} nats per token, perplexity {found['perplexity']:.4g}, "
            f"{found['bits_per_byte']:.4f} bits per byte, of {found['tokens']:,} tokens"
        )
    return 0


def _export(options: ExportOptions) -> int:
    trained = open_trained(options.run)
    if isinstance(trained.model, GPT):
        raise InputError(
            f"{options.run}: the GPT of --size is no model of transformers; its tensors are written by "
            f"scale-train snapshot consolidate {options.run} model.safetensors"
        )
    tokenizer = None if trained.tokenizer == BYTE else tokenizer_file(Path(trained.tokenizer)).parent
    export_model(trained.model, options.folder, tokenizer, Group())
    print(f"export         {options.folder}")
    return 0


def open_trained(path: Path) -> Trained:
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


def _of_folder(path: Path) -> Trained:
    config = read_config(path)
    model = build_on_meta(config)
    load_pretrained(model, path, device="cpu", cast=True, process_group=Group())
    tokenizer = str(path) if tokenizer_file(path).exists() else BYTE
    positions = number_in(config, "positions") or _MOST_POSITIONS
    return Trained(model.eval(), tokenizer, min(positions, _MOST_POSITIONS))


def _of_checkpoint(point: Path) -> Trained:
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
    return Trained(model.eval(), said.get("tokenizer", BYTE), said["data"]["sequence"])


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor, sequence: int, batch: int, device: torch.device) -> float:
    """Returns nats per token of `tokens`, `[tokens]`, in windows one after the other, without a part at the end."""
    starts = torch.arange((len(tokens) - 1) // sequence) * sequence
    nats = 0.0
    for some in starts.split(batch):
        inputs, targets = windows_at(tokens, some, sequence)
        found = model(inputs.to(device))
        logits: Tensor = getattr(found, "logits", found)
        nats += functional.cross_entropy(
            logits.float().flatten(0, 1), targets.to(device).flatten(), reduction="sum"
        ).item()
    return nats / (len(starts) * sequence)
