"""A user's point-to-point messages in flight during steps of ShardedDataParallel, whatever their tags."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from scale_core.testing import run_ranks
from scale_oss import OSS, ShardedDataParallel

TAGS = [*range(16), 100, 1 << 20]


@contextmanager
def messages_in_flight() -> Iterator[None]:
    """Posts sends of many tags, runs what stands between, and receives them."""
    rank = dist.get_rank()
    sends = [dist.isend(torch.full((5,), tag + rank), 1 - rank, tag=tag) for tag in TAGS]
    yield
    for tag in TAGS:
        received = torch.empty(5, dtype=torch.int64)
        dist.recv(received, 1 - rank, tag=tag)
        assert received.tolist() == [tag + 1 - rank] * 5
    for send in sends:
        send.wait()


def train_with_messages() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    inner = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(plain.parameters(), lr=0.1), OSS(inner.parameters(), torch.optim.SGD, lr=0.1)]
    model = ShardedDataParallel(inner, optimizers[1])
    for _ in range(3):
        batch = torch.randn(4, 4, dtype=torch.float64)
        with messages_in_flight():
            for module, optimizer, rows in zip(
                (plain, model), optimizers, (batch, batch.chunk(2)[dist.get_rank()]), strict=True
            ):
                module(rows).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for name, full in model.state_dict().items():
            torch.testing.assert_close(full, plain.state_dict()[name.removeprefix("module.")], rtol=0, atol=1e-12)


def test_a_step_runs_among_messages_of_any_tag() -> None:
    run_ranks(train_with_messages, 2)
