"""collectives.py: a group whose backend knows devices alone moves what is on the host, too.

"cuda:gloo" stands for NCCL here: a process group that no tensor on the host can pass.
"""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from scale_core.comm.all_to_all import all_to_all
from scale_core.comm.collectives import (
    all_gather,
    all_reduce,
    broadcast,
    exchange,
    exchange_text,
    group_for,
    reduce_scatter,
)
from scale_core.comm.group import group_of
from scale_core.errors import TransferError
from scale_core.optim.grad_scaler import ShardedGradScaler

HOST, DEVICE = torch.device("cpu"), torch.device("cuda")


@pytest.mark.ranks(2, backend="cuda:gloo")
def test_a_group_of_devices_moves_what_is_on_the_host() -> None:
    group = group_of()
    with pytest.raises(RuntimeError, match="No backend"):
        dist.all_reduce(torch.ones(1))
    mine, everyone = torch.tensor([1.0, 2.0]) * (group.rank + 1), range(group.size)
    assert exchange([group.rank], group) == [[rank] for rank in everyone]
    assert exchange_text("word" * group.rank, group) == ["word" * rank for rank in everyone]
    gathered = all_gather(torch.empty(2 * group.size), mine, group).wait()
    assert gathered.tolist() == [value * (rank + 1) for rank in everyone for value in (1.0, 2.0)]
    count = sum(rank + 1.0 for rank in everyone)
    assert all_reduce(mine.clone(), group).wait().tolist() == [count, 2 * count]
    assert broadcast(mine.clone(), group, source=1).wait().tolist() == [2.0, 4.0]
    assert reduce_scatter(torch.ones(group.size), group).wait().tolist() == [1.0]
    ranks = torch.full((group.size,), float(group.rank))
    assert all_to_all(torch.empty(group.size), ranks, group).wait().tolist() == list(everyone)
    assert group_for(HOST, group) is group_for(HOST, group) is not group_for(DEVICE, group)
    assert group_for(DEVICE, group) is group.process_group


@pytest.mark.ranks(2, backend="cuda:gloo")
def test_limits_hold_on_the_host_and_who_is_missing_is_named() -> None:
    group = group_of()
    exchange([0], group)
    short = group_of(dist.new_group(backend="cuda:gloo", timeout=timedelta(seconds=1)))
    if group.rank == 0:
        with pytest.raises(TransferError, match=r"^exchange with rank 1 failed: "):
            exchange([1], group, limit_seconds=0.3)
        text = r"^meeting on the host with rank 1 failed: no answer within 1 s\. "
        with pytest.raises(TransferError, match=text):
            exchange([1], short)


@pytest.mark.ranks(2, backend="cuda:gloo")
def test_a_scaler_on_a_group_of_devices_skips_on_all_ranks() -> None:
    rank, layer = dist.get_rank(), nn.Linear(2, 2)
    scaler, optimizer = ShardedGradScaler(init_scale=2.0), torch.optim.SGD(layer.parameters(), lr=1.0)
    before = layer.weight.detach().clone()
    scaler.scale(layer(torch.ones(1, 2)).sum() * (torch.inf if rank == 1 else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before) and scaler.get_scale() == 1.0


@pytest.mark.ranks(2)
def test_no_message_of_ours_is_on_the_group_that_was_passed() -> None:
    both = dist.new_group(backend="cpu:gloo,cuda:gloo")
    for group in (group_of(), group_of(both)):
        assert group_for(HOST, group) is group_for(HOST, group) is not group.process_group
        assert group_for(DEVICE, group) is group.process_group


@pytest.mark.ranks(2, backend="cuda:gloo")
def test_without_gloo_the_error_says_so() -> None:
    dist.is_gloo_available = lambda: False
    with pytest.raises(RuntimeError, match=r"on the host, and this torch was built without gloo"):
        group_for(HOST, group_of())
