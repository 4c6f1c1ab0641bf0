"""buffer.py: a parameter without memory can be printed, and is a parameter like any other."""

from __future__ import annotations

import torch
from torch import nn

from scale_core.flat.storage import UnshardedParameter


def test_released_parameters_say_so_and_gathered_ones_show() -> None:
    full = torch.arange(7.0)
    matrix, scalar = (
        UnshardedParameter(full[:6].view(2, 3), requires_grad=False),
        UnshardedParameter(full[6], requires_grad=False),
    )
    full.untyped_storage().resize_(0)
    assert repr(matrix) == str(matrix) == f"{matrix}"
    assert str([matrix]) == "[<a released parameter of shape (2, 3), torch.float32: it has values while its unit runs>]"
    assert "shape ()" in f"{scalar}"
    full.untyped_storage().resize_(7 * 4)
    full.copy_(torch.arange(7.0))
    assert "[3., 4., 5.]" in repr(matrix) and repr(matrix).startswith("Parameter containing")
    assert "6." in f"{scalar}"
    assert repr(UnshardedParameter(torch.empty(0))) == repr(nn.Parameter(torch.empty(0)))


def test_it_is_compiled_and_differentiated_as_a_parameter() -> None:
    layer, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    for name, param in plain.named_parameters():
        setattr(layer, name, UnshardedParameter(param.detach().clone()))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    for module in (compiled, plain):
        module(torch.ones(4, 3)).square().sum().backward()
    assert layer.weight.grad is not None and plain.weight.grad is not None
    assert torch.equal(layer.weight.grad, plain.weight.grad)
    assert type(layer.weight.detach()) is torch.Tensor
