"""A user's point-to-point messages in flight during the steps of each technique, whatever their tags."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from scale_fsdp import fully_shard
from scale_oss import OSS, ShardedDataParallel
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


def in_fully_shard(net: nn.Sequential) -> tuple[nn.Module, Optimizer]:
    fully_shard(net[0])
    fully_shard(net)
    return net, SGD(net.parameters(), lr=0.1)


def in_sharded_ddp(net: nn.Sequential) -> tuple[nn.Module, Optimizer]:
    optimizer = OSS(net.parameters(), SGD, lr=0.1)
    return ShardedDataParallel(net, optimizer), optimizer


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


@pytest.mark.parametrize("wrap", [in_fully_shard, in_sharded_ddp])
@pytest.mark.ranks(2, in_turn=True)
def test_a_step_runs_among_messages_of_any_tag(wrap: Callable[[nn.Sequential], tuple[nn.Module, Optimizer]]) -> None:
    plain = net()
    model, optimizer = wrap(copy.deepcopy(plain))
    for _ in range(3):
        batch = torch.randn(4, 4, dtype=torch.float64)
        sides = ((plain, SGD(plain.parameters(), lr=0.1), batch), (model, optimizer, batch.chunk(2)[dist.get_rank()]))
        with messages_in_flight():
            for module, stepping, rows in sides:
                module(rows).square().mean().backward()
                stepping.step()
                stepping.zero_grad()
        for name, full in model.state_dict().items():
            torch.testing.assert_close(full, plain.state_dict()[name.removeprefix("module.")], rtol=0, atol=1e-12)


@pytest.mark.ranks(2)
def test_a_step_of_a_pipeline_runs_among_messages_of_any_tag() -> None:
    losses: list[list[float]] = []
    for talks in (False, True):
        pipe = DistributedPipe(net(), "1f1b", balance=[2, 1], chunks=2)
        optimizer = SGD(pipe.parameters(), lr=0.1)
        losses.append([])
        for _ in range(3):
            batch, target = torch.randn(4, 4, dtype=torch.float64), torch.zeros(4, 3, dtype=torch.float64)
            with messages_in_flight() if talks else nullcontext():
                loss = pipe.step(batch, target=target, loss_fn=nn.functional.mse_loss)
                optimizer.step()
                optimizer.zero_grad()
            losses[-1].append(float(loss))
    quiet, among_messages = losses
    assert quiet == among_messages
