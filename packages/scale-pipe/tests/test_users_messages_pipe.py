"""A user's point-to-point messages in flight during steps of a pipeline, whatever their tags."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from scale_core.testing import run_ranks
from scale_pipe import DistributedPipe

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


def step_with_messages() -> list[list[float]]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    losses = []
    for talks in (False, True):
        torch.manual_seed(1)
        pipe = DistributedPipe(copy.deepcopy(plain), "1f1b", balance=[2, 1], chunks=2)
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            batch, target = torch.randn(4, 4, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
            with messages_in_flight() if talks else nullcontext():
                loss = pipe.step(batch, target=target, loss_fn=nn.functional.mse_loss)
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(float(loss))
    return losses


def test_a_step_runs_among_messages_of_any_tag() -> None:
    for quiet, among_messages in run_ranks(step_with_messages, 2):
        assert quiet == among_messages
