"""A `Pipe` has the state of its layers under their own names, and reads what other `Pipe`s have saved."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from scale_pipe import Pipe, pop, skippable, stash


@skippable(stash=["skip"])
class Stash(nn.Linear):
    def forward(self, input: Tensor) -> Any:
        yield stash("skip", input)
        return super().forward(input)


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, input: Tensor) -> Iterator[Any]:
        return input + (yield pop("skip"))  # type: ignore[return-value]


def model() -> nn.Sequential:
    return nn.Sequential(Stash(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), Pop())


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)


def test_names_are_those_of_the_layers_in_any_balance() -> None:
    plain = model()
    expected = {key: value.clone() for key, value in plain.state_dict().items()}
    pipe = Pipe(plain, [1, 1, 1])
    assert same(pipe.state_dict(), expected)
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in plain.named_parameters()]
    other, again = Pipe(model(), [2, 1]), model()
    other.load_state_dict(pipe.state_dict())
    again.load_state_dict(pipe.state_dict())
    assert same(other.state_dict(), expected) and same(again.state_dict(), expected)


def as_fairscale(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """The same state as FairScale's Pipe with a balance [1, 2] names it, whose skippable layers hold a module."""
    named = {}
    for key, value in state.items():
        layer, name = key.split(".", 1)
        named[f"{prefix}partitions.{int(layer != '0')}.{layer}.{'module.' if layer == '0' else ''}{name}"] = value
    return named


def test_state_of_fairscale_is_loaded_into_any_balance() -> None:
    saved, pipe = model().state_dict(), Pipe(model(), [2, 1])
    foreign = as_fairscale(saved)
    assert "partitions.0.0.module.weight" in foreign and "partitions.1.1.0.weight" in foreign
    pipe.load_state_dict(foreign)
    assert same(pipe.state_dict(), saved)
    outer = nn.ModuleDict({"pipe": Pipe(model(), [1, 2])})
    outer.load_state_dict(as_fairscale(saved, "pipe."))
    assert same(outer["pipe"].state_dict(), saved)


def test_keys_that_belong_to_nothing_are_still_refused() -> None:
    pipe = Pipe(model(), [2, 1])
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"9\.weight"'):
        pipe.load_state_dict({**pipe.state_dict(), "partitions.1.9.weight": torch.ones(1)})
    with pytest.raises(RuntimeError, match="Missing key"):
        pipe.load_state_dict({})


def test_a_layer_of_that_name_is_itself() -> None:
    made = nn.Sequential()
    made.add_module("partitions", nn.Sequential(nn.Linear(2, 2)))
    pipe = Pipe(made, [1])
    assert list(pipe.state_dict()) == ["partitions.0.weight", "partitions.0.bias"]
    saved = {key: torch.full_like(value, 3) for key, value in pipe.state_dict().items()}
    pipe.load_state_dict(saved)
    assert same(pipe.state_dict(), saved) and isinstance(pipe.partitions, nn.ModuleList)
