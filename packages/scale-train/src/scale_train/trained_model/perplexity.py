"""`scale-train ppl`, on one process. Exit codes: 0 done; 2 wrong input."""

from __future__ import annotations

import json
import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from scale_train.configuration.resolve import resolve_device
from scale_train.data.text import read_text, windows_at
from scale_train.errors import InputError, reported
from scale_train.model.gpt import without_cache
from scale_train.trained_model.loading import open_trained_model
from scale_train.trained_model.options import PplOptions


def ppl(options: PplOptions) -> int:
    """Runs the command and returns its exit code."""
    return reported(lambda: _ppl(options))


def _ppl(options: PplOptions) -> int:
    for flag, number in (("--batch", options.batch), ("--sequence", options.sequence)):
        if number is not None and number < 1:
            raise InputError(f"{flag} {number}: at least 1 is needed")
    device = torch.device(resolve_device(options.device))
    trained = open_trained_model(options.model)
    sequence = options.sequence or trained.sequence
    trained.check_sequence(sequence)
    tokenizer = trained.open_tokenizer(options.tokenizer)
    text = read_text(options.text, tokenizer, text_field=options.text_field, held_out_every=1)
    if len(text.held_out) < sequence + 1:
        raise InputError(
            f"--text {text.source}: too few tokens for --sequence {sequence}: {len(text.held_out)}, and "
            f"{sequence + 1} are needed"
        )
    loss = mean_loss(trained.model.to(device), text.held_out, sequence, options.batch, device)
    report = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) * text.tokens_per_byte,
        "tokens": (len(text.held_out) - 1) // sequence * sequence,
    }
    if options.json:
        print(json.dumps(report))
    else:
        print(
            f"loss {report['loss']:.4f} nats per token, perplexity {report['perplexity']:.4g}, "
            f"{report['bits_per_byte']:.4f} bits per byte, of {report['tokens']:,} tokens"
        )
    return 0


@torch.no_grad()
def mean_loss(model: nn.Module, tokens: Tensor, sequence: int, batch: int, device: torch.device) -> float:
    """Returns nats per token of `tokens`, `[tokens]`, in windows one after the other, without a part at the end."""
    starts = torch.arange((len(tokens) - 1) // sequence) * sequence
    nats = 0.0
    for some in starts.split(batch):
        inputs, targets = windows_at(tokens, some, sequence)
        output = model(inputs.to(device), **without_cache(model))
        logits: Tensor = getattr(output, "logits", output)
        nats += functional.cross_entropy(
            logits.float().flatten(0, 1), targets.to(device).flatten(), reduction="sum"
        ).item()
    return nats / (len(starts) * sequence)
