"""What a rank measures of its own gradients."""

import gc

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scale_adascale import AdaScale
from scale_core.backward import local_grads_wanted


def test_nobody_is_told_of_gradients_once_an_adascale_is_gone() -> None:
    model = nn.Linear(2, 1)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    assert local_grads_wanted()
    del optimizer
    gc.collect()
    assert not local_grads_wanted()


def test_a_module_that_is_in_two_reentrant_checkpoints_of_one_pass_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    hidden = torch.ones(4, 3, requires_grad=True)
    for _ in range(2):
        hidden = checkpoint(model[0], hidden, use_reentrant=True)
    with pytest.raises(
        RuntimeError, match=r"a parameter of shape .* has two gradients in one backward pass.*use_reentrant=False"
    ):
        model[1](hidden).sum().backward()
    assert optimizer.gain() == 1.0


def test_hooks_of_another_adascale_are_nobody_elses() -> None:
    model = nn.Linear(2, 1)
    both = [AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2) for _ in range(2)]
    for sample in torch.eye(2):
        model(sample).sum().backward()
    assert both[0].gain() == both[1].gain() > 1
