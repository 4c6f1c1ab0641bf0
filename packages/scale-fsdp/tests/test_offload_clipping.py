"""offload_clipping.py: a factor that waits for the step, for the gradients that it was made for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from scale_core.optim.clip_grad import clip_grad_norm_
from scale_fsdp.offload.optimizer import DeferredClipping


def params() -> list[Tensor]:
    found = [nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(2))]
    for number, param in enumerate(found[:2]):
        param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
    return list(found)


@pytest.mark.parametrize("max_norm", [0.1, 1e9])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_the_factor_is_that_of_clipping_and_the_gradients_stay(max_norm: float, norm_type: float) -> None:
    mine, theirs, clipping = params(), params(), DeferredClipping()
    norm = clipping.measure(mine, max_norm, norm_type)
    assert torch.equal(norm, clip_grad_norm_(theirs, max_norm, norm_type))
    for one, other, start in zip(mine, theirs, params(), strict=True):
        if one.grad is None or other.grad is None or start.grad is None:
            assert one.grad is other.grad is start.grad is None
            continue
        assert torch.equal(one.grad, start.grad)
        assert torch.equal(one.grad * clipping.factor(mine), other.grad)


def test_without_clipping_nothing_is_multiplied() -> None:
    clipping = DeferredClipping()
    assert clipping.factor(params()) == 1.0
    mine = params()
    clipping.measure(mine, 0.1, 2.0)
    clipping.reset()
    assert clipping.factor(mine) == 1.0


CHANGES: dict[str, Callable[[list[Tensor]], object]] = {
    "one was added to": lambda params: params[0].grad.add_(1),  # type: ignore[union-attr]
    "one is another tensor": lambda params: setattr(params[0], "grad", params[0].grad.clone()),  # type: ignore[union-attr]
    "one is gone": lambda params: setattr(params[1], "grad", None),
    "one is new": lambda params: setattr(params[2], "grad", torch.ones(2)),
}


def test_gradients_that_are_gone_are_forgotten() -> None:
    mine, clipping = params(), DeferredClipping()
    clipping.measure(mine, 0.1, 2.0)
    for param in mine:
        param.grad = None  # As model.zero_grad() does, of which the optimizer hears nothing.
    assert clipping.factor(mine) == 1.0
    for one, new in zip(mine, params(), strict=True):
        one.grad = None if new.grad is None else new.grad * 2
    theirs = [param.detach().requires_grad_() for param in mine]
    for one, other in zip(mine, theirs, strict=True):
        other.grad = None if one.grad is None else one.grad.clone()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\), or clip again"):
        clipping.factor(mine)  # They may be the old ones, changed.
    assert torch.equal(clipping.measure(mine, 0.1, 2.0), clip_grad_norm_(theirs, 0.1, 2.0))
    for one, other in zip(mine, theirs, strict=True):
        assert one.grad is None or torch.equal(one.grad * clipping.factor(mine), other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("change", CHANGES)
def test_gradients_that_have_changed_are_an_error(change: str) -> None:
    mine, clipping = params(), DeferredClipping()
    clipping.measure(mine, 0.1, 2.0)
    CHANGES[change](mine)
    for ask in (lambda: clipping.factor(mine), lambda: clipping.measure(mine, 0.1, 2.0)):
        with pytest.raises(RuntimeError, match="have changed since"):
            ask()
    clipping.reset()
    clipping.measure(mine, 0.1, 2.0)
