"""What a rank measures of its own gradients."""

import gc

import torch
from torch import nn

from scale_adascale import AdaScale
from scale_core.backward import local_grads_wanted


def test_nobody_is_told_of_gradients_once_an_adascale_is_gone() -> None:
    model = nn.Linear(2, 1)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    assert local_grads_wanted()
    del optimizer
    gc.collect()
    assert not local_grads_wanted()
