"""Tensors of one shape and dtype that a module returns together, on the way through the stages of a split model."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from distributed_cases import assert_near
from split_models import run_in_turn
from torch import Tensor, nn

from scale_pipe import DistributedPipe, split
from scale_pipe.module_split.placeholder_tensor import PlaceholderTensorError

INPUT = torch.linspace(-1, 1, 32, dtype=torch.float64).view(8, 4)
CUTS = ["layers.1", "layers.3"]


class Rotary(NamedTuple):
    cos: Tensor
    sin: Tensor


@dataclass
class Turn:
    cos: Tensor
    sin: Tensor


def _of_mapping(output: Any) -> tuple[Tensor, Tensor]:
    return output["cos"], output["sin"]


def _of_attributes(output: Any) -> tuple[Tensor, Tensor]:
    return output.cos, output.sin


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda cos, sin: (cos, sin), tuple),
    "list": (lambda cos, sin: [cos, sin], tuple),
    "dict": (lambda cos, sin: {"cos": cos, "sin": sin}, _of_mapping),
    "named tuple": (Rotary, _of_attributes),
    "dataclass": (Turn, _of_attributes),
    "mapping": (lambda cos, sin: UserDict(cos=cos, sin=sin), _of_mapping),
    "nested": (
        lambda cos, sin: {"tables": [(cos,), Turn(cos, sin)]},
        lambda output: _of_attributes(output["tables"][1]),
    ),
    "one tensor twice": (lambda cos, sin: (sin, cos, sin), lambda output: output[1:]),
}


class Tables(nn.Module):
    """Returns two tables [4]."""

    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.angles = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor) -> Any:
        return CONTAINERS[self.container][0](self.angles.cos(), self.angles.sin())


class Layer(nn.Module):
    def __init__(self, container: str) -> None:
        super().__init__()
        self.container = container
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, tables: Any = None, cos: Tensor | None = None, sin: Tensor | None = None) -> Tensor:
        if tables is not None:
            cos, sin = CONTAINERS[self.container][1](tables)
        assert cos is not None and sin is not None
        turned: Tensor = self.linear(x) * cos + x * sin
        return turned


class Rotated(nn.Module):
    """Layers [N, 4] to the same, each with the tables as it is told."""

    def __init__(self, container: str = "tuple", handed: str = "apart") -> None:
        super().__init__()
        self.container, self.handed = container, handed
        self.tables = Tables(container)
        self.layers = nn.ModuleList(Layer(container) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tables = self.tables(x)
        cos, sin = CONTAINERS[self.container][1](tables)
        for layer in self.layers:
            if self.handed == "together":
                x = layer(x, tables)
            elif self.handed == "by keyword":
                x = layer(x, tables=tables)
            else:
                x = layer(x, cos=cos, sin=sin)
        return x


def build(*options: str) -> Rotated:
    torch.manual_seed(0)
    return Rotated(*options).double()


@pytest.mark.parametrize("handed", ["together", "by keyword", "apart"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_tensors_of_one_shape_stay_apart(container: str, handed: str) -> None:
    model = build(container, handed)
    plain = copy.deepcopy(model)
    output, expected = run_in_turn(split(model, CUTS), INPUT), plain(INPUT)
    output.sum().backward()
    expected.sum().backward()
    assert torch.equal(output, expected)
    for param, plain_param in zip(model.parameters(), plain.parameters(), strict=True):
        assert param.grad is not None and plain_param.grad is not None
        torch.testing.assert_close(param.grad, plain_param.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, in_turn=True)
@pytest.mark.parametrize("container", ["tuple", "dataclass"])
@pytest.mark.parametrize("schedule, cuts", [("1f1b", ["layers.2"]), ("zb_v", ["layers.1", "layers.2", "layers.3"])])
def test_they_are_trained_on_two_ranks_as_on_one(schedule: str, cuts: list[str], container: str) -> None:
    model = build(container, "together")
    plain = copy.deepcopy(model)
    pipe = DistributedPipe(split(model, cuts), schedule, chunks=4)
    optimizers = [torch.optim.SGD(trained.parameters(), lr=0.1) for trained in (pipe, plain)]
    for _ in range(2):
        pipe.step(INPUT, target=INPUT.flip(0), loss_fn=nn.functional.mse_loss)
        nn.functional.mse_loss(plain(INPUT), INPUT.flip(0)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, param in pipe.named_parameters():
        assert_near(param, plain.get_parameter(name), name)


class Scaled(nn.Module):
    """Layers that are given a parameter of the model; the last one is given twice of it, if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))
        self.layers = nn.ModuleList(Layer("tuple") for _ in range(3))

    def forward(self, x: Tensor, doubled: bool) -> Tensor:
        twice = self.scale * 2
        for index, layer in enumerate(self.layers):
            x = layer(x, cos=twice if doubled and index == 2 else self.scale, sin=self.scale)
        return x


def test_a_parameter_of_the_last_batch_is_not_used_again() -> None:
    first, second = split(Scaled().double(), ["layers.1"])
    second(first(INPUT, doubled=False))
    with pytest.raises(PlaceholderTensorError, match="from parameter 'scale' of stage 0, which went around the cut"):
        second(first(INPUT, doubled=True))
