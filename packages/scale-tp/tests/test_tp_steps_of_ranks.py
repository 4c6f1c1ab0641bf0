"""Tensor parallel ranks whose optimizers do different things, or that train different parameters, are told."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from scale_core.testing import run_ranks
from scale_tp import parallelize

STEPS = 10


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6)).double()
    parallelize(layers, {"0": "colwise", "2": "rowwise"}, dist.group.WORLD)
    return layers


def train(layers: nn.Module, step: Callable[[int], object], steps: int = STEPS) -> str:
    batches = torch.Generator().manual_seed(1)
    for number in range(steps):
        try:
            layers(torch.randn(4, 6, generator=batches, dtype=torch.float64)).square().mean().backward()
        except Exception as error:
            return f"{number}: {type(error).__name__}: {error}"
        step(number)
        layers.zero_grad()
    return "nothing"


def alike(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = Adam(layers.parameters(), lr=0.1)
    return lambda number: optimizer.step()


def other_rate(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1 / (1 + rank))
    return lambda number: optimizer.step()


def other_kind(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer: Optimizer = (SGD, Adam)[rank](layers.parameters(), lr=0.1)
    return lambda number: optimizer.step()


def left_out(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)
    return lambda number: (number == 2 and rank == 1) or optimizer.step()


def twice(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)
    return lambda number: [optimizer.step() for _ in range(2 if number == 1 and rank == 1 else 1)]


def frozen(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.step()
        if number == 1 and rank == 1:
            layers.get_parameter("2.bias").requires_grad_(False)

    return step


CASES = {
    alike: r"^nothing$",
    other_rate: r"^1: ContractError: .* on '.*'.*: rank 0: SGD with lr=0\.1; rank 1: SGD with lr=0\.05",
    other_kind: r"^1: ContractError: .*rank 0: SGD with .*; rank 1: Adam with ",
    left_out: r"^3: ContractError: .*rank 0: SGD; rank 1: no step",
    twice: r"^2: ContractError: .*rank 0: SGD; rank 1: 2 steps, SGD, SGD",
    frozen: r"^2: ContractError: the ranks differ in which parameters train, first .*rank 0: 2\.bias; rank 1: .*Freeze",
}


def outcomes() -> dict[str, str]:
    rank, said = dist.get_rank(), {}
    for build in CASES:
        layers = model()
        said[build.__name__] = train(layers, build(layers, rank))
    late, copied = model(), copy.deepcopy(model())
    optimizer = SGD(late.parameters(), lr=0.1)
    said["late"] = train(late, lambda number: (number == 12 and rank == 1) or optimizer.step(), steps=25)
    said["copied"] = train(copied, other_rate(copied, rank))
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    return run_ranks(outcomes, 2)


@pytest.mark.fault(97)
@pytest.mark.fault(101)
@pytest.mark.parametrize(("build", "expected"), CASES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_differs_is_an_error_in_the_next_forward(
    build: Callable[..., object], expected: str, said: list[dict[str, str]]
) -> None:
    for outcome in said:
        assert re.search(expected, outcome[build.__name__], re.DOTALL), outcome[build.__name__]


def test_after_the_first_steps_it_is_found_within_ten(said: list[dict[str, str]]) -> None:
    for outcome in said:
        told = outcome["late"]
        assert re.search(r"^19: ContractError: .*rank 0: 10 steps, SGD.*rank 1: 9 steps", told), told


def test_a_copy_is_compared_too(said: list[dict[str, str]]) -> None:
    for outcome in said:
        assert outcome["copied"].startswith("1: ContractError: "), outcome["copied"]
