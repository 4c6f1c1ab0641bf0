"""The parameters of a recomputation: those of the forward, or an error where they are gone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from scale_checkpoint import apply_checkpointing, checkpoint_wrapper
from scale_checkpoint.recompute.params import put_back, replaced, used_by
from scale_checkpoint_cases import differing


def built() -> nn.Sequential:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    return nn.Sequential(inner, nn.Tanh())


@pytest.mark.parametrize("how", ["recompute", "offload", ["addmm"]])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [torch.Tensor.requires_grad_, nn.Parameter])
def test_a_functional_call_is_recomputed_with_its_own_parameters_and_buffers(
    how: Any, training: bool, kind: Any
) -> None:
    found = []
    for treatment in ("keep", how):
        model = built().train(training)
        apply_checkpointing(model[0], treatment, min_bytes=0)
        torch.manual_seed(1)
        params = {name: kind(torch.randn_like(p)) for name, p in model.named_parameters()}
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


def test_a_parameter_that_was_assigned_before_the_backward_is_not_computed_with() -> None:
    found = []
    for wrap in (nn.Module.train, checkpoint_wrapper):
        model = wrap(built()[0])
        before = model[3].weight
        loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum()
        model[3].weight = after = nn.Parameter(torch.zeros(4, 8))
        loss.backward()
        assert after.grad is None and model[3].weight is after
        found.append([before.grad, *(p.grad for p in model.parameters())])
    assert differing(found[1], found[0]) == []


def test_a_functional_parameter_that_is_changed_before_the_backward_is_an_error() -> None:
    for kind in (torch.Tensor.requires_grad_, nn.Parameter):
        model = checkpoint_wrapper(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
        params = {name: kind(torch.randn_like(p)) for name, p in model.named_parameters()}
        loss = functional_call(model, params, (torch.randn(2, 4),)).sum()
        with torch.no_grad():
            params["0.bias"].mul_(2)
        with pytest.raises(RuntimeError, match=r"the parameter 'bias' \[4\] of a Linear was changed in place"):
            loss.backward()


def test_a_buffer_that_is_changed_before_the_backward_is_an_error_and_one_that_is_assigned_is_put_back() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.register_buffer("centre", torch.linspace(-1, 1, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x) - self.centre).tanh().exp()

    found = []
    for wrap in (nn.Module.train, checkpoint_wrapper):
        torch.manual_seed(0)
        model = wrap(Centred())
        loss = model(torch.ones(2, 4)).sum()
        model.centre = model.centre * 3
        loss.backward()
        found.append([*(p.grad for p in model.parameters()), model.centre])
    assert differing(found[1], found[0]) == []
    loss = model(torch.ones(2, 4)).sum()
    model.centre.mul_(3)  # A subtraction saves nothing, so the plain module would go on; here its value is gone.
    with pytest.raises(
        RuntimeError, match=r"the buffer 'centre' \[4\] of a Centred was changed in place .*assign a new"
    ):
        loss.backward()


def test_what_an_engine_has_let_go_of_is_left_to_the_engine() -> None:
    """A shard in the place of a gathered parameter: of another shape or, on one rank, of the same."""
    layer = nn.Linear(2, 2)
    used = used_by([layer])
    assert replaced(used) == []
    whole = layer.weight
    shard = layer.weight = nn.Parameter(torch.zeros(1))
    assert replaced(used) == []
    with put_back(replaced(used)):
        assert layer.weight is shard
    alike = layer.weight = nn.Parameter(torch.zeros(2, 2))
    assert [use.tensor for use in replaced(used)] == [whole]
    with put_back(replaced(used)):
        assert layer.weight is whole
    assert layer.weight is alike
    whole.untyped_storage().resize_(0)
    assert replaced(used) == []
