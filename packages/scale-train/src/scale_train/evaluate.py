"""Evaluation on held-out text, in bits per byte, which are comparable between models with other tokens."""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from scale_core.comm.collectives import exchange
from scale_core.comm.group import Group
from scale_train.data.sampler import windows_at
from scale_train.model import IGNORED
from scale_train.parallelize.engine import Engine


def held_out_starts(num_bytes: int, sequence: int, most_tokens: int) -> Tensor:
    """Returns where windows start, `[windows]`, int64: evenly spread, the same in every evaluation."""
    windows = (num_bytes - 1) // sequence
    if most_tokens:
        windows = min(windows, max(1, most_tokens // sequence))
    last = num_bytes - 1 - sequence
    return torch.tensor([last * index // max(1, windows - 1) for index in range(windows)])


@torch.no_grad()
def bits_per_byte(engine: Engine, text: Tensor, starts: Tensor, sequence: int, micro_batch: int, group: Group) -> float:
    """Returns the mean over the windows of `text`, uint8 `[bytes]`, at `starts`; called on all ranks, equal on all.

    Each rank reads its share. Where the windows do not divide, a rank pads its batch with windows that do not count,
    because a forward pass of a sharded model is one of all ranks.
    """
    engine.model.eval()
    pipeline, axes = engine.pipeline, engine.axes
    rank, size, counts = axes.data.rank, axes.data.size, axes.tensor.rank == 0
    if pipeline is not None:
        rank, size, counts = pipeline.replica, pipeline.num_replicas, pipeline.group.rank == 0
    rounds = math.ceil(len(starts) / (size * micro_batch))
    nats = 0.0
    for turn in range(rounds):
        first = (turn * size + rank) * micro_batch
        mine = starts[first : first + micro_batch]
        padding = starts[:1].expand(micro_batch - len(mine))
        batch = windows_at(text, torch.cat([mine, padding]), sequence)
        batch.targets[len(mine) :] = IGNORED
        with engine.autocast():
            loss = engine.model(batch.tokens.to(engine.device), batch.targets.to(engine.device), "sum")
        nats += loss.item()
    engine.model.train()
    return sum_over_ranks(nats if counts else 0.0, group) / (math.log(2) * len(starts) * sequence)


def sum_over_ranks(value: float, group: Group) -> float:
    """Returns the sum over ranks, in rank order, so that it is the same to the bit on all."""
    (bits,) = struct.unpack("<q", struct.pack("<d", value))
    return math.fsum(struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in exchange([bits], group))
