"""Optimizers that step differently on the ranks of one model raise on all of them at the end of the next pass."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shard_arguments import shard_arguments
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import SGD, Adam, Optimizer

from scale_core import ContractError
from scale_fsdp import ShardOptions, fully_shard

Steps = Callable[[nn.Module, int], Callable[[int], object]]  # How a rank steps after each pass, by its number


def model(**options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    fully_shard(layers[0], **shard_arguments(**options))
    fully_shard(layers, **shard_arguments(**options))
    return layers


def train(step: Callable[[int], object], layers: nn.Module, passes: int = 4) -> str:
    """Calls `step` with the number of each pass after it; returns in which pass what was raised."""
    for number in range(passes):
        try:
            layers(torch.ones(2, 6, dtype=torch.float64)).square().mean().backward()
        except ContractError as error:
            return f"{number}: {error}"
        step(number)
        layers.zero_grad()
    return "nothing"


def other_rates(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    def step(number: int) -> None:
        optimizer.step()
        plateau.step(1.0 if rank else 1.0 - 0.1 * number)

    return step


def other_kinds(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = (Adam if rank else SGD)(layers.parameters(), lr=0.1)
    return lambda number: optimizer.step()


def other_numbers(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)
    return lambda number: [optimizer.step() for _ in range(1 + (rank == 1 and number == 1))]


def by_turns(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)
    return lambda number: optimizer.step() if number % 2 == rank else None


def one_alone(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)
    return lambda number: None if rank else optimizer.step()


def frozen_on_one_rank(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.step()
        layers[2].bias.requires_grad_(rank == 0 or number != 1)  # type: ignore[index]

    return step


def without_memory(layers: nn.Module, rank: int) -> Callable[[int], object]:
    """The program catches that one rank has no memory for its step, and goes on."""
    optimizer = SGD(layers.parameters(), lr=0.1)

    def fail() -> float:
        raise MemoryError

    def step(number: int) -> None:
        with contextlib.suppress(MemoryError):
            optimizer.step(fail if rank == 1 and number == 1 else None)

    return step


def frozen_alike(layers: nn.Module, rank: int) -> Callable[[int], object]:
    optimizer = SGD(layers.parameters(), lr=0.1)

    def step(number: int) -> None:
        optimizer.step()
        layers[2].bias.requires_grad_(number != 1)  # type: ignore[index]

    return step


def of_present_parts(layers: nn.Module, rank: int) -> Callable[[int], object]:
    """Each rank has an optimizer for the parameters of which it has elements, with a rate for each size."""
    present = [{"params": [param], "lr": 0.01 * param.ndim} for param in layers.parameters() if param.numel()]
    optimizers: list[Optimizer] = [SGD(present)] if present else []
    return lambda number: [optimizer.step() for optimizer in optimizers]


def alike(layers: nn.Module, rank: int) -> Callable[[int], object]:
    """What may differ: the implementation, and steps on other models. With accumulation, and an evaluation."""
    optimizer = SGD(layers.parameters(), lr=0.1, foreach=rank == 0)
    alone = nn.Linear(2, 2)
    mine = SGD(alone.parameters(), lr=0.1 + rank)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def step(number: int) -> None:
        alone(torch.ones(1, 2)).sum().backward()
        for _ in range(1 + rank):
            mine.step()
        with torch.no_grad():
            layers(torch.ones(2, 6, dtype=torch.float64))
        if number % 2:
            optimizer.step()
            schedule.step()

    return step


@pytest.mark.fault(101)
@pytest.mark.parametrize(
    "steps, expected",
    [
        (other_rates, "3: step 4: .*rank 0: SGD with lr=0.1; rank 1: SGD with lr=0.05"),
        (other_kinds, "1: step 2: .*rank 0: SGD with .*; rank 1: Adam with"),
        (other_numbers, "2: step 3: .*rank 0: SGD; rank 1: 2 steps, SGD, SGD"),
        (by_turns, "1: step 2: .*rank 0: SGD; rank 1: no step"),
        (one_alone, "1: step 2: .*rank 0: SGD; rank 1: no step"),
        (without_memory, "2: step 3: .*rank 0: SGD; rank 1: no step.*Then go back to the last checkpoint"),
    ],
)
@pytest.mark.ranks(2, in_turn=True)
def test_steps_that_differ_raise_one_pass_later(steps: Steps, expected: str) -> None:
    layers = model()
    outcome = train(steps(layers, dist.get_rank()), layers)
    assert re.search(expected, outcome), outcome
    assert "the ranks have stepped differently on '2.weight' since they last compared" in outcome


@pytest.mark.ranks(2)
def test_parts_without_a_common_parameter_are_compared_too() -> None:
    small = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Linear(3, 6, bias=False)).double()
    fully_shard(small, options=ShardOptions(atom="parameter"))  # Each rank has one of the parameters.
    outcome = train(other_rates(small, dist.get_rank()), small)
    assert "on their parts of the model" in outcome and "rank 1: SGD with lr=0.05" in outcome


@pytest.mark.fault(97)
@pytest.mark.ranks(2)
def test_a_parameter_frozen_on_one_rank_raises_in_the_next_pass() -> None:
    layers = model()
    outcome = train(frozen_on_one_rank(layers, dist.get_rank()), layers)
    assert outcome.startswith(
        "2: step 3: the ranks train different parameters: rank 0: as at first; rank 1: '2.bias' was frozen. Freeze"
    )


@pytest.mark.parametrize(
    "steps, options",
    [
        (alike, {}),
        (frozen_alike, {}),
        (of_present_parts, {"atom": "element"}),
        (of_present_parts, {"atom": "parameter"}),
    ],
)
@pytest.mark.ranks(2, in_turn=True)
def test_what_may_differ_is_left_alone(steps: Steps, options: dict[str, Any]) -> None:
    layers = model(**options)
    assert train(steps(layers, dist.get_rank()), layers) == "nothing"


@pytest.mark.ranks(4)
def test_copies_that_step_differently_raise_too() -> None:
    layers = model(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    outcome = train(other_rates(layers, dist.get_rank() // 2), layers)
    assert "ranks 0, 1: SGD with lr=0.1; ranks 2, 3: SGD with lr=0.05" in outcome
