"""traits.py: the table says of torch's classes what they do."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from scale_core.optim.traits import ELEMENTWISE, KINDS, NUMBERS, PER_PARAMETER, OptimizerTraits, known_bases

# With these, each keeps all that it can keep.
OPTIONS: dict[type[Optimizer], dict[str, Any]] = {
    optim.SGD: {"momentum": 0.9},
    optim.RMSprop: {"momentum": 0.9, "centered": True},
    optim.Adam: {"amsgrad": True},
    optim.AdamW: {"amsgrad": True},
}
KNOWN = sorted(KINDS, key=lambda cls: cls.__name__)


def test_every_class_of_torch_is_known() -> None:
    found = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert found - {Optimizer} == set(KINDS)
    assert set(KINDS) - ELEMENTWISE - PER_PARAMETER == {optim.LBFGS, optim.SparseAdam}


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_an_elementwise_optimizer_treats_each_element_alone(kind: type[Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(8, generator=generator), torch.randn(3, 8, generator=generator)
    options = OPTIONS.get(kind, {})

    def train(pieces: list[int]) -> torch.Tensor:
        params = [nn.Parameter(piece.clone()) for piece in start.split(pieces)]
        optimizer = kind(params, lr=0.1, foreach=False, **options)  # type: ignore[call-arg]
        for grad in grads:
            for param, piece in zip(params, grad.split(pieces), strict=True):
                param.grad = piece.clone()
            optimizer.step()
        return torch.cat([param.detach() for param in params])

    assert torch.equal(train([8]), train([1, 3, 4]))


@pytest.mark.parametrize("cls", KNOWN)
def test_what_an_optimizer_remembers_is_what_the_table_says(cls: type[Optimizer]) -> None:
    kind = KINDS[cls]
    assert ("fused" in inspect.signature(cls).parameters) == kind.fused
    if kind.scope == "all":
        return
    param = nn.Parameter(torch.ones(3, 4))
    param.grad = torch.full((3, 4), 0.5)
    if kind.sparse:
        param.grad = param.grad.to_sparse(1)
    optimizer = cls([param], lr=0.1, **OPTIONS.get(cls, {}))  # type: ignore[call-arg]
    optimizer.step()
    state = optimizer.state[param]
    elements = {key for key, value in state.items() if isinstance(value, Tensor) and value.shape == param.shape}
    numbers = {key for key, value in state.items() if not isinstance(value, Tensor) or value.dim() == 0}
    assert elements == set(kind.elements) and numbers == set(kind.numbers) <= NUMBERS
    assert (elements | numbers == set(state)) or kind.scope == "parameter"


def test_a_class_is_known_by_the_names_of_what_it_is_made_of() -> None:
    class Lamb(optim.SGD):
        pass

    class Own(Lamb):
        pass

    assert [kind.name for kind in known_bases(Own)] == ["Lamb", "SGD"]
    assert known_bases(Own)[0].scope == "parameter"
    assert known_bases(Optimizer) == []


def test_who_looks_further_than_an_element_says_at_what() -> None:
    for kind in KINDS.values():
        assert isinstance(kind, OptimizerTraits) and bool(kind.needs) == (kind.scope != "element")
