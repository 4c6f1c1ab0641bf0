"""The parameters of a recomputation: those of the forward, or an error where they are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper
from scale_checkpoint.weights import put_back, replaced, used_by
from scale_checkpoint_cases import differing


def built() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return nn.Sequential(inner, nn.Tanh())


@pytest.mark.parametrize("how", ["recompute", "offload", ["addmm"]])
@pytest.mark.parametrize("training", [True, False])
def test_a_functional_call_is_recomputed_with_its_own_parameters_and_buffers(how: Any, training: bool) -> None:
    found = []
    for treatment in ("keep", how):
        model = built().train(training)
        apply_checkpointing(model[0], treatment, min_bytes=0)
        torch.manual_seed(1)
        params = {name: torch.randn_like(p).requires_grad_() for name, p in model.named_parameters()}
        buffers = {name: torch.rand_like(b.float()).to(b.dtype) for name, b in model.named_buffers()}
        loss = functional_call(model, (params, buffers), (torch.randn(3, 4),)).square().sum()
        loss.backward()  # By now the module holds its own parameters again.
        found.append([loss.detach(), *(p.grad for p in params.values()), *buffers.values(), *model.buffers()])
        assert all(p.grad is None for p in model.parameters())
    assert differing(found[1], found[0]) == []


def test_a_parameter_that_is_changed_before_the_backward_is_an_error() -> None:
    """In the plain module too, for a weight; a bias is not saved there, but here it is computed with once more."""
    for name in ("weight", "bias"):
        model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        loss = model(torch.randn(2, 4)).sum()
        with torch.no_grad():
            getattr(model[0], name).mul_(2)
        with pytest.raises(RuntimeError, match=rf"the parameter '{name}' \[4.*\] of a Linear was changed in place"):
            loss.backward()
        model(torch.randn(2, 4)).sum().backward()


def test_a_parameter_that_its_own_forward_clips_is_none() -> None:
    class Clipped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-2, 2, 5))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.weight.clamp_(-1, 1)
            return (x * self.weight).tanh().exp()

    model = checkpoint_wrapper(Clipped())
    model(torch.ones(5)).sum().backward()
    assert model.weight.grad is not None


def test_another_parameter_in_the_place_of_one_is_left_there() -> None:
    layer = nn.Linear(2, 2)
    used = used_by([layer])
    assert replaced(used) == []
    shard = layer.weight = nn.Parameter(torch.zeros(1))
    assert replaced(used) == []
    with put_back(replaced(used)):
        assert layer.weight is shard
