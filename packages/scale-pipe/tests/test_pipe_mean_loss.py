"""Losses that say that they are sums are refused: a step takes the loss of a micro-batch for a mean."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from scale_pipe import DistributedPipe, StageError
from scale_pipe.distributed.step_inputs import check_is_mean


@pytest.mark.parametrize(
    "loss_fn, title",
    [
        (nn.MSELoss(reduction="sum"), "MSELoss"),
        (partial(functional.cross_entropy, reduction="sum"), "cross_entropy"),
        (partial(partial(functional.mse_loss, reduction="sum"), weight=None), "mse_loss"),
        (partial(nn.L1Loss(reduction="sum")), "L1Loss"),
    ],
)
def test_a_sum_is_refused(loss_fn: Any, title: str) -> None:
    with pytest.raises(ValueError, match=f'{title} has reduction="sum": write reduction="mean"; or, .* N \\* sum_loss'):
        check_is_mean(loss_fn)


def test_means_and_what_says_nothing_are_taken() -> None:
    means: list[Any] = [
        None,
        nn.MSELoss(),
        nn.KLDivLoss(reduction="batchmean"),
        functional.mse_loss,
        partial(functional.mse_loss, reduction="mean"),
        partial(partial(functional.mse_loss, reduction="sum"), reduction="mean"),
        lambda output: output.sum(),
    ]
    for loss_fn in means:
        check_is_mean(loss_fn)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # That is what is meant.
def test_a_step_refuses_it_and_what_the_error_says_to_write_has_the_gradients_of_the_sum() -> None:
    layers = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    batch, target, sum_loss = torch.randn(5, 3), torch.randn(5, 2), nn.MSELoss(reduction="sum")
    expected = torch.autograd.grad(sum_loss(layers(batch), target), list(layers.parameters()))
    pipe = DistributedPipe(layers, "gpipe", balance=[2], chunks=2)
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(StageError, match='MSELoss has reduction="sum"'):
            call(batch, target=target, loss_fn=sum_loss)
    assert all(parameter.grad is None for parameter in pipe.parameters())
    loss = pipe.step(batch, target=target, loss_fn=lambda output, target: 5 * sum_loss(output, target) / len(target))
    torch.testing.assert_close(loss, sum_loss(layers(batch), target).detach())
    for parameter, gradient in zip(pipe.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
