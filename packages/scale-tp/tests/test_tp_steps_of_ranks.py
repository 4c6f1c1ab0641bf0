"""Tensor parallel ranks whose optimizers do different things, or that train different parameters, are told.

Whether `parallelize` has divided the model, or it is built of the layers by hand, where no model is known.
"""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from scale_core import Group, ScaleDistributedError
from scale_tp import ColumnParallelLinear, RowParallelLinear, initialize_model_parallel, parallelize
from scale_tp.conversion import model_hooks

Act = Callable[[int, nn.Module, Optimizer], object]


@pytest.fixture(autouse=True)
def _compares_replicas_in_each_step(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "by_hand" in request.node.name:
        monkeypatch.setenv("SCALE_CHECK_REPLICAS_EVERY", "1")


def test_steps_are_compared_in_first_forwards_and_each_tenth(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(model_hooks, "compare_optimizer_steps", lambda *given: calls.append(given))
    model, check = nn.Linear(2, 2), model_hooks.OptimizerStepCheck(Group())
    compared: list[int] = []
    for number in range(1, 22):
        calls.clear()
        check(model, ())
        compared += [number] * len(calls)
    assert compared == [1, 2, 3, 4, 10, 20]


def parallelized() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.LayerNorm(6)).double()
    parallelize(layers, {"0": "colwise", "2": "rowwise"}, dist.group.WORLD)
    return layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.up = ColumnParallelLinear(6, 8, gather_output=False, dtype=torch.float64)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True, dtype=torch.float64)
        self.register_buffer("own", torch.full((1,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def by_hand() -> nn.Sequential:
    torch.manual_seed(0)
    initialize_model_parallel(2)
    return blocks()


def blocks() -> nn.Sequential:
    return nn.Sequential(Block(), Block())


def train(
    layers: nn.Module, act: Act = lambda *_: None, steps: int = 10, kinds: tuple[type[Optimizer], ...] = (SGD,)
) -> str:
    """Calls `act` in each step, in place of the optimizer's step if it returns True; returns what was raised, when."""
    optimizer = kinds[dist.get_rank() % len(kinds)](layers.parameters(), lr=0.1)  # type: ignore[call-arg]
    batches = torch.Generator().manual_seed(1)
    for number in range(steps):
        try:
            layers(torch.randn(4, 6, generator=batches, dtype=torch.float64)).square().mean().backward()
        except ScaleDistributedError as error:
            return f"{number}: {type(error).__name__}: {error}"
        if not act(number, layers, optimizer):
            optimizer.step()
        optimizer.zero_grad()
    return "nothing"


def is_in(number: int, step: int) -> bool:
    return number == step and dist.get_rank() == 1


def left_out(number: int, layers: nn.Module, optimizer: Optimizer) -> bool:
    return is_in(number, 2)


def twice(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    if is_in(number, 1):
        optimizer.step()


def other_rate(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    if is_in(number, 0):
        optimizer.param_groups[0]["lr"] = 0.05


def frozen(number: int, layers: nn.Sequential, optimizer: Optimizer) -> None:
    if is_in(number, 1):
        name = "0.up.bias" if isinstance(layers[0], Block) else "2.bias"
        layers.get_parameter(name).requires_grad_(False)


def flipped_bias(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    if is_in(number, 4):
        layers.get_parameter("1.down.bias").data[0] += 0.5


def flipped_norm(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    if is_in(number, 4):
        layers.get_parameter("0.norm.weight").data[0] += 0.5


@pytest.mark.fault(97, 101)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [parallelized, by_hand])
@pytest.mark.parametrize(
    "act, expected",
    [
        (other_rate, r"^1: ContractError: .* on '.*'.*: rank 0: SGD with lr=0\.1; rank 1: SGD with lr=0\.05"),
        (left_out, r"^3: ContractError: .*rank 0: SGD; rank 1: no step"),
        (twice, r"^2: ContractError: .*rank 0: SGD; rank 1: 2 steps, SGD, SGD"),
        (
            frozen,
            r"^2: ContractError: the ranks differ in which parameters train, first .*rank 0: .*; rank 1: .*Freeze",
        ),
    ],
)
def test_what_differs_is_an_error_in_the_next_forward(build: Callable[[], nn.Module], act: Act, expected: str) -> None:
    text = train(build(), act)
    assert re.search(expected, text, re.DOTALL), text


@pytest.mark.fault(115)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("act", [flipped_bias, flipped_norm])
def test_replicated_parameters_by_hand_that_diverge_are_an_error(act: Act) -> None:
    text = train(by_hand(), act)
    expected = r"^5: DivergenceError: .*parameter .* of SGD': each of the ranks 0, 1"
    assert re.search(expected, text, re.DOTALL), text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [parallelized, by_hand])
def test_optimizers_of_other_kinds_are_an_error(build: Callable[[], nn.Module]) -> None:
    text = train(build(), kinds=(SGD, Adam))
    assert re.search(r"^1: ContractError: .*rank 0: SGD.*; rank 1: Adam", text, re.DOTALL), text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [parallelized, by_hand])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_ranks_that_train_alike_go_on(kind: type[Optimizer], build: Callable[[], nn.Module]) -> None:
    assert train(build(), kinds=(kind,)) == "nothing"


@pytest.mark.ranks(2)
def test_after_the_first_steps_it_is_found_within_ten() -> None:
    text = train(parallelized(), lambda number, *_: is_in(number, 12), steps=25)
    assert re.search(r"^19: ContractError: .*rank 0: 10 steps, SGD.*rank 1: 9 steps", text), text


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [parallelized, by_hand])
def test_a_copy_is_compared_too(build: Callable[[], nn.Module]) -> None:
    text = train(copy.deepcopy(build()), left_out)
    assert re.search(r"^3: ContractError: .*rank 1: no step", text, re.DOTALL), text


@pytest.mark.ranks(2)
def test_it_does_not_matter_when_a_rank_by_hand_forgets_a_model() -> None:
    first = by_hand()
    assert train(first) == "nothing"
    kept = first if dist.get_rank() else None
    del first
    gc.collect()
    assert train(blocks()) == "nothing"
    del kept


@pytest.mark.ranks(2)
def test_no_record_keeps_a_model_by_hand_that_is_gone() -> None:
    layers = by_hand()
    train(layers)
    weight = weakref.ref(layers.get_parameter("0.up.weight"))
    del layers
    gc.collect()
    assert weight() is None
