"""Which scaler has multiplied the loss, whoever stands between it and the step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adascale_cases import loss_of, net
from torch.optim import SGD

from scale_adascale import AdaScale
from scale_adascale.grad_scaler import scale_of, scaler_of_step
from scale_core import ShardedGradScaler


class Stub:
    """What a scaler takes for an optimizer, and what its step sees."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [torch.nn.Parameter(torch.ones(1))]}]
        self.seen: Any = None

    def step(self) -> None:
        self.seen = scale_of(scaler_of_step())


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, ShardedGradScaler])
@pytest.mark.parametrize("enabled", [True, False])
def test_the_scaler_that_steps_is_found_through_functions_of_others(kind, enabled):
    options = {} if kind is ShardedGradScaler else {"device": "cpu"}
    scaler, stub = kind(init_scale=64.0, enabled=enabled, **options), Stub()
    stub.param_groups[0]["params"][0].grad = torch.ones(1)
    original = stub.step
    stub.step = lambda: (lambda: original())()
    if enabled:
        scaler.scale(torch.ones(1))
    scaler.step(stub)
    assert stub.seen == (64.0 if enabled else 1.0)
    original()
    assert stub.seen == 1.0


def test_after_loading_a_gain_that_is_asked_for_before_the_first_step_is_the_saved_one():
    """Which scaler there is, only a step tells."""
    model, scaler = net(), torch.amp.GradScaler("cpu", 2.0**10)
    optimizers = [AdaScale(SGD(model.parameters(), lr=1e-30), num_gradients_to_accumulate=2)]
    for number in range(6):
        if number == 4:
            optimizers.append(AdaScale(SGD(model.parameters(), lr=1e-30), num_gradients_to_accumulate=2))
            optimizers[1].load_state_dict(optimizers[0].state_dict())
        saved = optimizers[-1].gain()
        for seed in (2 * number, 2 * number + 1):
            scaler.scale(loss_of(model, seed) / 2).backward()
        if number == 4:
            assert optimizers[1].gain() == saved != optimizers[0].gain()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        optimizers[-1].zero_grad()
        optimizers[0].zero_grad()
        assert optimizers[-1].gain() == optimizers[0].gain() > 1


def test_a_step_that_others_have_wrapped_has_the_gain_of_unscaled_losses():
    """While the scale grows at each step."""
    models, scaler = [net(), net()], torch.amp.GradScaler("cpu", 2.0**10, growth_interval=1)
    scaled, plain = (
        AdaScale(SGD(model.parameters(), lr=0.01), num_gradients_to_accumulate=2, smoothing=0.9) for model in models
    )
    step = scaled.step
    scaled.step = lambda *args, **kwargs: step(*args, **kwargs)
    for number in range(4):
        for seed in (2 * number, 2 * number + 1):
            scaler.scale(loss_of(models[0], seed) / 2).backward()
            (loss_of(models[1], seed) / 2).backward()
        scaler.step(scaled)
        scaler.update()
        plain.step()
        scaled.zero_grad()
        plain.zero_grad()
        assert scaled.gain() == pytest.approx(plain.gain(), rel=1e-9)
    assert scaler.get_scale() == 2.0**14


def test_a_step_that_the_scaler_skips_warns_of_nothing_whoever_asks_for_the_gain():
    """Warnings are errors here. The first step of a training is skipped often, before any scaler was seen."""
    model, scaler = net(), torch.amp.GradScaler("cpu", 2.0**10)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    gains = []
    for step in range(4):
        for seed in (2 * step, 2 * step + 1):
            scaler.scale(loss_of(model, seed) / 2 * (torch.inf if step in (0, 2) else 1.0)).backward()
        scaler.step(optimizer)
        gains.append(optimizer.gain())
        scaler.update()
        optimizer.zero_grad()
    assert gains[0] == 1.0 < gains[1] == gains[2] != gains[3]
