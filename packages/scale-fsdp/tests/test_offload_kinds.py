"""optimizer_kinds.py: what the classes of torch.optim may be divided by."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from scale_fsdp.offload.kinds import ELEMENTWISE, PER_PARAMETER, split_of


class Own(optim.SGD):
    """A class that nobody knows."""


def test_every_class_of_torch_is_known_or_refused() -> None:
    found = {kind for kind in vars(optim).values() if isinstance(kind, type) and issubclass(kind, Optimizer)}
    assert found - {Optimizer} == ELEMENTWISE | PER_PARAMETER | {optim.LBFGS, optim.SparseAdam}


@pytest.mark.parametrize("kind", sorted(ELEMENTWISE, key=lambda kind: kind.__name__))
def test_an_elementwise_optimizer_treats_each_element_as_if_it_were_alone(kind: type[Optimizer]) -> None:
    generator = torch.Generator().manual_seed(0)
    start, grads = torch.randn(8, generator=generator), torch.randn(3, 8, generator=generator)
    options = {} if kind is not optim.SGD else {"momentum": 0.9}

    def train(pieces: list[int]) -> torch.Tensor:
        params = [nn.Parameter(piece.clone()) for piece in start.split(pieces)]
        optimizer = kind(params, lr=0.1, foreach=False, **options)  # type: ignore[call-arg]
        for grad in grads:
            for param, piece in zip(params, grad.split(pieces), strict=True):
                param.grad = piece.clone()
            optimizer.step()
        return torch.cat([param.detach() for param in params])

    assert torch.equal(train([8]), train([1, 3, 4]))


def test_the_tables_say_how_to_divide() -> None:
    assert split_of(optim.AdamW, None) == "element" and split_of(optim.AdamW, "parameter") == "parameter"
    for kind in PER_PARAMETER:
        assert split_of(kind, None) == "parameter"
        with pytest.raises(ValueError, match=f"{kind.__name__} needs each parameter as a whole: pass split="):
            split_of(kind, "element")


def test_a_class_that_is_not_known_needs_a_word_from_the_user() -> None:
    with pytest.raises(ValueError, match=r'Own updates each element by itself is not known.*split="element"'):
        split_of(Own, None)
    assert split_of(Own, "element") == "element"


def test_what_can_not_work_in_two_places_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="LBFGS can't work in two places: its direction depends on all"):
        split_of(optim.LBFGS, None)
    with pytest.raises(ValueError, match=r"SparseAdam can't work .* sparse"):
        split_of(optim.SparseAdam, "element")
    with pytest.raises(ValueError, match="split to be"):
        split_of(optim.SGD, "row")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"class of optimizers, got \[\]: pass the class first"):
        split_of([], None)  # type: ignore[arg-type]
