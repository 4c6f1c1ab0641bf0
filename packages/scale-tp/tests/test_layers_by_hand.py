"""Tensor parallel layers that were built by hand compare steps and replicas, though no model is known."""

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

from scale_core import ScaleDistributedError
from scale_core.testing import run_ranks
from scale_tp import ColumnParallelLinear, RowParallelLinear, initialize_model_parallel


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.up = ColumnParallelLinear(6, 8, gather_output=False, dtype=torch.float64)
        self.down = RowParallelLinear(8, 6, input_is_parallel=True, dtype=torch.float64)
        self.register_buffer("own", torch.full((1,), float(dist.get_rank())))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


Act = Callable[[int, nn.Module, Optimizer], object]


def train(act: Act, steps: int = 8, kind: type[Optimizer] = SGD, layers: nn.Module | None = None) -> str:
    """Calls `act` in each step, in place of the optimizer's step if it returns True; returns what was raised, when."""
    layers = layers or model()
    optimizer = kind(layers.parameters(), lr=0.1)  # type: ignore[call-arg]
    for number in range(steps):
        try:
            layers(torch.ones(2, 6, dtype=torch.float64)).square().sum().backward()
        except ScaleDistributedError as error:
            return f"{number}: {type(error).__name__}: {error}"
        if not act(number, layers, optimizer):
            optimizer.step()
        optimizer.zero_grad()
    return "nothing"


def flip(number: int, when: int, param: Tensor) -> None:
    if number == when and dist.get_rank() == 1:
        param.data.view(-1)[0] += 0.5


def left_out(number: int, layers: nn.Module, optimizer: Optimizer) -> bool:
    return number == 2 and dist.get_rank() == 1


def other_rate(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    if number == 1 and dist.get_rank() == 1:
        optimizer.param_groups[0]["lr"] = 0.2


def frozen(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    if number == 1 and dist.get_rank() == 1:
        layers.get_parameter("0.up.bias").requires_grad_(False)


def flipped_bias(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    flip(number, 4, layers.get_parameter("1.down.bias"))


def flipped_norm(number: int, layers: nn.Module, optimizer: Optimizer) -> None:
    flip(number, 4, layers.get_parameter("0.norm.weight"))


CASES: dict[Act, str] = {
    left_out: r"^3: ContractError: .*rank 0: SGD; rank 1: no step",
    other_rate: r"^2: ContractError: .*rank 0: SGD with lr=0\.1; rank 1: SGD with lr=0\.2",
    frozen: r"^2: ContractError: the ranks differ in which parameters train",
    flipped_bias: r"^5: DivergenceError: .*parameter .* of SGD': each of the ranks 0, 1",
    flipped_norm: r"^5: DivergenceError: .*parameter .* of SGD': each of the ranks 0, 1",
}


def outcomes() -> dict[str, str]:
    initialize_model_parallel(2)
    said = {act.__name__: train(act) for act in CASES}
    first = model()
    said["alike"] = train(lambda number, layers, optimizer: None, layers=first)
    kept = first if dist.get_rank() else None
    del first
    gc.collect()
    said["next"] = train(lambda number, layers, optimizer: None)
    del kept
    last = model()
    train(lambda number, layers, optimizer: None, layers=last)
    weight = weakref.ref(last.get_parameter("0.up.weight"))
    del last
    gc.collect()
    said["kept"] = str(weight() is not None)
    said["copied"] = train(left_out, layers=copy.deepcopy(model()))
    said["kinds"] = train(lambda *_: None, kind=Adam if dist.get_rank() else SGD)
    return said


@pytest.fixture(scope="module")
def said() -> list[dict[str, str]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SCALE_CHECK_REPLICAS_EVERY", "1")
        return run_ranks(outcomes, 2)


@pytest.mark.fault(97)
@pytest.mark.fault(101)
@pytest.mark.fault(115)
@pytest.mark.parametrize(("act", "expected"), CASES.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_differs_is_an_error_in_the_next_pass(act: Act, expected: str, said: list[dict[str, str]]) -> None:
    for outcome in said:
        assert re.search(expected, outcome[act.__name__], re.DOTALL), outcome[act.__name__]


def test_a_copy_and_other_kinds_are_compared_too(said: list[dict[str, str]]) -> None:
    for outcome in said:
        assert re.search(r"^3: ContractError: .*rank 1: no step", outcome["copied"], re.DOTALL), outcome["copied"]
        assert re.search(r"^1: ContractError: .*rank 0: SGD.*; rank 1: Adam", outcome["kinds"], re.DOTALL)


def test_ranks_that_train_alike_go_on(said: list[dict[str, str]]) -> None:
    assert [outcome["alike"] for outcome in said] == ["nothing", "nothing"]


def test_no_record_keeps_a_model_that_is_gone(said: list[dict[str, str]]) -> None:
    assert [outcome["kept"] for outcome in said] == ["False", "False"]


def test_it_does_not_matter_when_a_rank_forgets_an_earlier_model(said: list[dict[str, str]]) -> None:
    assert [outcome["next"] for outcome in said] == ["nothing", "nothing"]
