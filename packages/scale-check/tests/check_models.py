"""Models, batches and wrappers of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD, AdamW, Optimizer

from scale_check import ParityError, Report, parity
from scale_check.fuzz.pool import run_in_turn
from scale_check.recording import Recording

BATCH = 8


class TiedModel(nn.Module):
    """A small language model: tied embedding, two blocks, one of them checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(2))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        hidden = hidden + self.blocks[0](hidden)
        hidden = hidden + torch.utils.checkpoint.checkpoint(self.blocks[1], hidden, use_reentrant=False)
        logits: Tensor = self.head(hidden)
        return logits


class PackedModel(nn.Module):
    """An LSTM over packed sequences; each begins with its length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm, self.head = nn.Embedding(11, 4), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        lengths = 1 + tokens[:, 0] % tokens.shape[1]
        packed = pack_padded_sequence(self.embed(tokens), lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.lstm(packed)
        output: Tensor = self.head(hidden[0])
        return output


def sparse_embedding() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Flatten(), nn.Linear(20, 2))


def sgd(params: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(params, lr=0.1)


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.LayerNorm(8), nn.Linear(8, 4)
    )


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 9, 3))


def batches(*shape: int, steps: int = 3) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(3)
    return [torch.randn(BATCH, *shape, generator=drawn) for _ in range(steps)]


def tokens(steps: int = 3) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(4)
    return [torch.randint(0, 11, (BATCH, 5), generator=drawn) for _ in range(steps)]


def adamw(params: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1)


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: nn.Module) -> nn.Module:
    for child in model.children():
        if any(True for _ in child.parameters(recurse=True)) and not isinstance(child, nn.ModuleList):
            fully_shard(child)
    return fully_shard(model)


def is_rank(rank: int) -> bool:
    """Whether this is that rank; never in the one process."""
    return dist.is_initialized() and dist.get_rank() == rank


def average(grad: Tensor) -> Tensor:
    total = grad.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def averaging(
    model: nn.Module, change: Callable[[str, Tensor], Tensor] = lambda name, grad: average(grad)
) -> nn.Module:
    """Data parallelism by hand: each gradient is averaged when it is there, or what `change` makes of it."""
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: change(name, grad))
    return model


def fsdp2_in_one_unit(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def accumulating_step(model: Any, optimizer: Optimizer, micro_batches: Sequence[Tensor]) -> Tensor:
    """Two micro-batches, of which DDP averages the gradients of the second."""
    optimizer.zero_grad()
    total = torch.zeros((), dtype=micro_batches[0].dtype)
    for number, part in enumerate(micro_batches):
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = number == 1
        loss = model(part).square().mean() / 2
        loss.backward()
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return total


def run_on_rank(call: Callable[[], Recording], folder: Path) -> Recording:
    return call()


class NotYetRun(Exception):
    """Ends a call of `parity` where it would start ranks."""


def parity_in_turn(programs: Mapping[str, Mapping[str, Any]]) -> dict[str, Report]:
    """What `parity` says of each program, right or wrong, with one start of two ranks for all."""
    calls: list[Callable[[], Recording]] = []

    def collect(call: Callable[[], Recording], *_: object, **__: object) -> None:
        calls.append(call)
        raise NotYetRun

    with mock.patch("scale_check.harness.run_ranks", collect):
        for arguments in programs.values():
            with suppress(NotYetRun):
                parity(**arguments)
    outcomes = list(run_in_turn(run_on_rank, calls, 2))
    assert all(outcome.results for outcome in outcomes), [outcome.failure for outcome in outcomes]
    reports: dict[str, Report] = {}
    for (name, arguments), outcome in zip(programs.items(), outcomes, strict=True):
        with mock.patch("scale_check.harness.run_ranks", return_value=list(outcome.results)):
            try:
                reports[name] = parity(**arguments)
            except ParityError as error:
                reports[name] = error.report
    return reports
