"""What hooks of others do to a gradient, and which pass it is of."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from scale_adascale.grad_hooks import is_changed_later, is_followed, is_nested


def same(grad: Tensor) -> Tensor:
    return grad


def of_ours(grad: Tensor) -> Tensor:
    return grad


of_ours.__module__ = "scale_anything"


def test_a_hook_is_followed_by_those_of_others_that_came_after_it() -> None:
    param = nn.Parameter(torch.ones(2))
    before = param.register_hook(same)
    handle = param.register_hook(of_ours)
    param.register_hook(of_ours)
    assert is_followed(param, before) is False  # Those of this house change nothing.
    assert is_followed(param, handle) is False
    after = param.register_hook(same)
    assert is_followed(param, handle) is True and is_followed(param, after) is False
    after.remove()
    assert is_followed(param, handle) is False


def test_hooks_that_are_called_when_a_gradient_was_added_change_it_later() -> None:
    param = nn.Parameter(torch.ones(2))
    assert is_changed_later(param) is False
    param.register_post_accumulate_grad_hook(of_ours)
    assert is_changed_later(param) is False
    handle = param.register_post_accumulate_grad_hook(same)
    assert is_changed_later(param) is True
    handle.remove()
    assert is_changed_later(param) is False


def test_the_pass_of_a_reentrant_checkpoint_is_nested() -> None:
    layer, found = nn.Linear(2, 2), []
    layer.weight.register_hook(lambda grad: found.append(is_nested()))
    x = torch.ones(1, 2, requires_grad=True)
    layer(x).sum().backward()
    checkpoint(layer, x, use_reentrant=True).sum().backward()
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert found == [False, True, False]
