"""The promise: the learning rate and schedule of the small batch, and gains that do not depend on how gradients come.

Against plain PyTorch, which computes each gradient alone and steps with the gain that the formulas give.
"""

from __future__ import annotations

import pytest
import torch
from adascale_cases import Plain, loss_of, net, run_passes
from torch.optim import SGD, Adam

from scale_adascale import AdaScale, GainScheduler, until_steps


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_training_is_plain_pytorchs_with_the_gains_of_formulas(kind):
    plain, model = Plain(net(), kind, 3, lr=0.05, preconditioned=kind == "adam"), net()
    optimizer = AdaScale(
        (Adam if kind == "adam" else SGD)(plain.groups_of(model), lr=0.05), num_gradients_to_accumulate=3
    )
    for step in range(6):
        seeds = range(3 * step, 3 * step + 3)
        run_passes(model, seeds)
        optimizer.step()
        optimizer.zero_grad()
        assert [optimizer.gain(0), optimizer.gain(1)] == pytest.approx(plain.step(seeds), rel=1e-5)
    torch.testing.assert_close(list(model.parameters()), list(plain.model.parameters()))


def test_a_batch_of_scale_one_is_trained_as_without_adascale():
    """To the bit, with its schedule, and as many steps."""
    models = [net(), net()]
    plain, inner = (SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    optimizer = AdaScale(inner)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(each, 8) for each in (plain, optimizer)]
    gains = GainScheduler(schedules[1], optimizer)
    taken = 0
    for seed in until_steps(list(range(8)), optimizer, steps=8):
        for model, each in zip(models, (plain, optimizer), strict=True):
            each.zero_grad()
            loss_of(model, seed).backward()
            each.step()
        schedules[0].step()
        gains.step()
        taken += 1
    assert taken == 8 == optimizer.progress
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models), strict=True))
