"""Optimizers of a pipeline's ranks: those that began alike have to go on so, and stages may have their own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from scale_core import ContractError, ScaleDistributedError
from scale_pipe import DistributedPipe

Step = Callable[[int], object]
Build = Callable[[DistributedPipe, int], Step]


def other_rates(pipe: DistributedPipe, rank: int) -> Step:
    optimizer = SGD(pipe.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    def step(number: int) -> None:
        optimizer.step()
        plateau.step(1.0 if rank else 1.0 - 0.1 * number)

    return step


def one_that_stops(pipe: DistributedPipe, rank: int) -> Step:
    optimizer = SGD(pipe.parameters(), lr=0.1)
    return lambda number: None if rank and number else optimizer.step()


def own_rates(pipe: DistributedPipe, rank: int) -> Step:
    """Layer-wise rates after a warmup from 0."""
    optimizer = SGD(pipe.parameters(), lr=0.1 * 0.5**rank)
    schedule = LambdaLR(optimizer, lambda number: number / 4)

    def step(number: int) -> None:
        optimizer.step()
        schedule.step()

    return step


def own_kinds(pipe: DistributedPipe, rank: int) -> Step:
    optimizer = (Adam if rank else SGD)(pipe.parameters(), lr=0.1)
    return lambda number: optimizer.step()


def own_groups(pipe: DistributedPipe, rank: int) -> Step:
    """One rank's optimizer gets a group more, with a rate of its own."""
    *first, last = pipe.parameters()
    optimizer = SGD(first, lr=0.1)

    def step(number: int) -> None:
        optimizer.step()
        if rank and number == 1:
            optimizer.add_param_group({"params": [last], "lr": 0.5})

    return step


def only_the_last(pipe: DistributedPipe, rank: int) -> Step:
    optimizers = [SGD(pipe.parameters(), lr=0.1)] if rank else []
    return lambda number: [optimizer.step() for optimizer in optimizers]


def alike(pipe: DistributedPipe, rank: int) -> Step:
    optimizer = SGD(pipe.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda number: 0.5**number)

    def step(number: int) -> None:
        pipe.evaluate(torch.ones(4, 6))
        if number % 2:
            optimizer.step()
            schedule.step()

    return step


def train(build: Build) -> str:
    torch.manual_seed(0)
    pipe = DistributedPipe(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4)), "1f1b", balance=[1, 1], chunks=2)
    step = build(pipe, dist.get_rank())
    for number in range(5):
        try:
            pipe.step(torch.ones(4, 6), target=torch.zeros(4, 4), loss_fn=nn.functional.mse_loss)
        except ContractError as error:
            with pytest.raises(ScaleDistributedError, match="have lost each other in an earlier step"):
                pipe.evaluate(torch.ones(4, 6))
            return f"{number}: {error}"
        step(number)
        pipe.zero_grad()
    return "nothing"


@pytest.mark.fault(101)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "build, step, text",
    [
        (other_rates, 3, "rank 0: SGD with lr=0.1; rank 1: SGD with lr=0.05"),
        (one_that_stops, 2, "rank 0: SGD; rank 1: no step"),
    ],
)
def test_optimizers_that_do_not_go_on_alike_raise(build: Build, step: int, text: str) -> None:
    outcome = train(build)
    assert outcome.startswith(f"{step}: ") and text in outcome
    assert build is not other_rates or "Stages may have hyperparameters of their own from the first step on" in outcome


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [own_rates, own_kinds, own_groups, only_the_last, alike])
def test_stages_may_have_optimizers_of_their_own(build: Build) -> None:
    assert train(build) == "nothing"
