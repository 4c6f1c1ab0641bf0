"""A backward pass that does not begin on one rank, as where the loss itself has no memory, is aborted on all."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from scale_core.errors import StepError
from scale_fsdp import ShardOptions, fully_shard

STEPS = 6


class FailingLoss(torch.autograd.Function):
    """A mean square whose own backward raises before any module has got a gradient."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, fails: bool) -> Tensor:
        ctx.save_for_backward(output)
        ctx.fails = fails
        return output.square().mean()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.fails:
            raise torch.OutOfMemoryError("no memory in the loss")
        (output,) = ctx.saved_tensors
        return 2 * output / output.numel() * grads[0], None


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def shard(net: nn.Sequential, reshard: bool) -> None:
    for module in (net[0], net[2], net[4], net):
        fully_shard(module, reshard_after_forward=reshard, options=ShardOptions(limit_seconds=20))


def full(net: nn.Module) -> dict[str, Tensor]:
    params: Any = net.named_parameters()
    return {name: param.full_tensor().detach().clone() for name, param in params}


def batch(step: int) -> Tensor:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def train_and_fail(at: int, reshard: bool, how: str) -> tuple[list[str], dict[str, Tensor]]:
    net = build()
    shard(net, reshard)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    told = []
    for step in range(STEPS + 1):
        fails = dist.get_rank() == 1 and step == at
        try:
            output = net(own(batch(step)))
            if fails and how == "skips the batch":
                continue
            FailingLoss.apply(output, fails).backward()
        except (StepError, torch.OutOfMemoryError) as error:
            told.append(f"{step} {type(error).__name__}: {error}")
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()
    return told, full(net)


@pytest.mark.fault(105)
@pytest.mark.parametrize("how", ["has no memory", "skips the batch"])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ranks(2, 3, in_turn=True)
def test_the_others_abort_the_step_and_all_go_on(reshard: bool, how: str) -> None:
    for at in (0, 1, 2) if dist.get_world_size() == 2 else (4,):
        told, params = train_and_fail(at, reshard, how)
        if dist.get_rank() == 1:
            assert told == ([f"{at} OutOfMemoryError: no memory in the loss"] if how == "has no memory" else [])
        else:
            (text,) = told
            assert text.startswith(f"{at} StepError: step {at + 1} was aborted on all ranks, because rank 1 failed.")
            assert "this rank has begun another forward pass in place of the backward pass: its loss raised" in text
        plain = build()
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
        for step in range(STEPS + 1):
            if step != at:
                plain(batch(step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        torch.testing.assert_close(params, {n: p.detach() for n, p in plain.named_parameters()}, rtol=1e-12, atol=1e-13)


def odd_program(net: nn.Module, take: Callable[[Tensor], Tensor], no_sync: Callable[[], Any], seed: int) -> None:
    """Forwards without a backward, and backward passes of several forwards, in an order that changes."""
    drawn = random.Random(seed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    batches = iter(range(1000 * seed, 1000 * seed + 1000))

    def loss() -> Tensor:
        output: Tensor = net(take(batch(next(batches))))
        return output.square().mean()

    for _ in range(8):
        kind = drawn.choice(["plain", "unused last", "unused first", "of two", "evaluation", "accumulation"])
        if kind == "plain":
            loss().backward()
        elif kind == "unused last":
            used, _ = loss(), loss()
            used.backward()
        elif kind == "unused first":
            loss(), loss()
            loss().backward()
        elif kind == "of two":
            (loss() + loss()).backward()
        elif kind == "evaluation":
            loss()
            net.eval()
            loss()
            net.train()
            loss().backward()
        else:
            with no_sync():
                loss().backward()
            loss()
            loss().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.fault(105)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.ranks(2, in_turn=True)
def test_forwards_without_a_backward_train_as_one_process(reshard: bool) -> None:
    for seed in range(4):
        plain, net = build(), build()
        shard(net, reshard)
        odd_program(net, own, net.no_sync, seed)
        odd_program(plain, lambda whole: whole, nullcontext, seed)
        expected = {name: param.detach() for name, param in plain.named_parameters()}
        torch.testing.assert_close(full(net), expected, rtol=1e-12, atol=1e-13)
