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


def build_pipe() -> DistributedPipe:
    torch.manual_seed(0)
    return DistributedPipe(nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 4)), "1f1b", balance=[1, 1], chunks=2)


def train(pipe: DistributedPipe, step: Step) -> str:
    """Five steps, each followed by `step` with its number; returns what was raised, when."""
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
def test_a_plateau_that_lowers_the_rate_on_one_rank_raises() -> None:
    pipe, rank = build_pipe(), dist.get_rank()
    optimizer = SGD(pipe.parameters(), lr=0.1)
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    def step(number: int) -> None:
        optimizer.step()
        plateau.step(1.0 if rank else 1.0 - 0.1 * number)

    text = train(pipe, step)
    assert text.startswith("3: ") and "rank 0: SGD with lr=0.1; rank 1: SGD with lr=0.05" in text
    assert "Stages may have hyperparameters of their own from the first step on" in text


@pytest.mark.fault(101)
@pytest.mark.ranks(2)
def test_an_optimizer_that_stops_on_one_rank_raises() -> None:
    pipe, rank = build_pipe(), dist.get_rank()
    optimizer = SGD(pipe.parameters(), lr=0.1)
    text = train(pipe, lambda number: None if rank and number else optimizer.step())
    assert text.startswith("2: ") and "rank 0: SGD; rank 1: no step" in text


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("kinds", [(SGD, Adam), (None, SGD)], ids=["other kinds", "only the last stage"])
def test_stages_may_have_optimizers_of_their_own(kinds: tuple[type[SGD | Adam] | None, ...]) -> None:
    pipe, kind = build_pipe(), kinds[dist.get_rank()]
    optimizers = [] if kind is None else [kind(pipe.parameters(), lr=0.1)]
    assert train(pipe, lambda number: [optimizer.step() for optimizer in optimizers]) == "nothing"


@pytest.mark.ranks(2)
def test_stages_may_have_rates_of_their_own_after_a_warmup() -> None:
    """Layer-wise rates, from 0 on."""
    pipe = build_pipe()
    optimizer = SGD(pipe.parameters(), lr=0.1 * 0.5 ** dist.get_rank())
    schedule = LambdaLR(optimizer, lambda number: number / 4)
    assert train(pipe, lambda number: (optimizer.step(), schedule.step())) == "nothing"


@pytest.mark.ranks(2)
def test_a_stage_may_get_a_group_with_a_rate_of_its_own() -> None:
    pipe, rank = build_pipe(), dist.get_rank()
    *first, last = pipe.parameters()
    optimizer = SGD(first, lr=0.1)

    def step(number: int) -> None:
        optimizer.step()
        if rank and number == 1:
            optimizer.add_param_group({"params": [last], "lr": 0.5})

    assert train(pipe, step) == "nothing"


@pytest.mark.ranks(2)
def test_evaluations_and_skipped_steps_alike_are_no_difference() -> None:
    pipe = build_pipe()
    optimizer = SGD(pipe.parameters(), lr=0.1)
    schedule = LambdaLR(optimizer, lambda number: 0.5**number)

    def step(number: int) -> None:
        pipe.evaluate(torch.ones(4, 6))
        if number % 2:
            optimizer.step()
            schedule.step()

    assert train(pipe, step) == "nothing"
