"""One worker that accumulates nothing: successive gradients, or batches in two halves."""

from __future__ import annotations

import pytest
import torch
from adascale_cases import build, loss_of, net
from torch import nn
from torch.optim import SGD, Adam

from scale_adascale import AdaScale, AdaScaleOptions
from scale_adascale.estimates import Average
from scale_adascale.gain import Moments, bounded, gain


def test_successive_gradients_are_compared():
    """Against the formula with all gradients, over five steps, with two groups."""
    model = net()
    groups = [list(model[0].parameters()), list(model[2].parameters())]
    optimizer = AdaScale(SGD([{"params": group} for group in groups], lr=0.05), scale=8.0, smoothing=0.5)
    averages, last = [Average(), Average()], None
    for step in range(5):
        loss_of(model, step).backward()
        now = [torch.cat([param.grad.double().reshape(-1) for param in group]) for group in groups]
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)  # Nothing to it: the pass was measured before.
        optimizer.step()
        optimizer.zero_grad()
        for number, new in enumerate(now if last is not None else []):
            old = last[number]
            variance = 8.0 * float((new - old).square().sum()) / 2
            square = float(((new + old) / 2).square().sum()) - variance / 16
            moments = bounded(Moments(variance, square))
            averages[number] = averages[number].updated(moments, 0.5, debias=True)
            assert optimizer.gain(number) == pytest.approx(gain(averages[number].moments, 8.0), rel=1e-6)
        if last is None:
            assert optimizer.gain() == 1.0
        last = now
    assert optimizer.progress > 5


def test_a_scaled_loss_changes_nothing_and_skips_compare_nothing():
    models, scaler = [net(), net()], torch.amp.GradScaler("cpu", 256.0)
    optimizers = [AdaScale(SGD(model.parameters(), lr=0.05), scale=4.0) for model in models]
    optimizers[0].grad_scaler = scaler
    for step in range(5):
        scaler.scale(loss_of(models[0], step) * (torch.inf if step == 2 else 1.0)).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()
        if step != 2:
            loss_of(models[1], step).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
        assert optimizers[0].gain() == pytest.approx(optimizers[1].gain(), rel=1e-9)
    assert optimizers[1].gain() > 1 and scaler.get_scale() == 128.0


def test_at_scale_one_the_gain_is_one_and_noise_is_measured():
    model = net()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.01))
    for step in range(6):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.gain() == 1.0
    found = optimizer.noise_scale(base_batch_size=4)
    assert 0 < found.value < float("inf") and found.low < found.value < found.high


def test_with_adam_both_gradients_get_the_new_ones_divisor():
    """Against the formula, with the moments before the step; what was measured of raw gradients is forgotten."""
    models = [net(), net()]
    optimizer = AdaScale(Adam(models[0].parameters(), lr=0.02), scale=8.0, smoothing=0.5)
    average, last = Average(), None
    for step in range(5):
        loss_of(models[0], step).backward()
        now = [param.grad.double() for param in models[0].parameters()]
        divisors = [_root_of_second_moment(optimizer, param) for param in models[0].parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if last is not None:
            old, new = (
                torch.cat([(g / d).reshape(-1) for g, d in zip(each, divisors, strict=True)]) for each in (last, now)
            )
            variance = 8.0 * float((new - old).square().sum()) / 2
            square = float(((new + old) / 2).square().sum()) - variance / 16
            average = average.updated(bounded(Moments(variance, square)), 0.5, debias=True)
            assert optimizer.gain() == pytest.approx(gain(average.moments, 8.0), rel=1e-6)
        last = now
    raw = AdaScale(
        Adam(models[1].parameters(), lr=0.02), scale=8.0, smoothing=0.5, options=AdaScaleOptions(preconditioned=False)
    )
    raw.load_state_dict(optimizer.state_dict())
    assert raw.gain() == optimizer.gain()
    for step in range(2):
        loss_of(models[1], step).backward()
        raw.step()
        raw.zero_grad()
    assert raw._state.estimates.groups[0].count == 1  # In other units: nothing of it is averaged with these.


def _root_of_second_moment(optimizer: AdaScale, param: torch.Tensor) -> float:
    if param not in optimizer.state:
        return 1.0
    state = optimizer.state[param]
    return float((state["exp_avg_sq"].double().mean() / (1 - 0.999 ** state["step"].double())).sqrt() + 1e-8)


@pytest.mark.parametrize("rows", [[3, 4], [3, 4, 5], [2, 3, 1]])
def test_sparse_gradients_have_the_gain_of_dense_ones(rows):
    gains = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table, scaler = nn.Embedding(7, 2, sparse=sparse), torch.amp.GradScaler("cpu", 8.0)
        optimizer = AdaScale(SGD(table.parameters(), lr=0.1), scale=4.0, options=AdaScaleOptions(grad_scaler=scaler))
        for batch in ([1, 2], rows):
            scaler.scale(table(torch.tensor(batch)).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        gains.append(optimizer.gain())
    assert gains[0] == pytest.approx(gains[1], rel=1e-9) and gains[0] > 1


def test_a_gradient_before_another_accumulation_is_not_compared():
    model, optimizer = build(1, scale=4.0)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.set_num_gradients_to_accumulate(2)
    optimizer.set_num_gradients_to_accumulate(1)
    loss_of(model, 1).backward()
    optimizer.step()
    assert optimizer.gain() == 1.0


def test_layers_frozen_in_one_of_two_steps_are_not_compared():
    """Each step has the same batch, and weights that do not move: there is no noise."""
    model = net()
    optimizer = AdaScale(SGD(model.parameters(), lr=1e-30), scale=8.0, smoothing=0.0)
    for step in range(5):
        model[0].requires_grad_(step in (0, 1, 4))
        model[2].requires_grad_(step in (0, 2, 3, 4))
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
        assert optimizer.gain() == pytest.approx(1.0, abs=1e-5)
    assert optimizer._state.estimates.groups[0].count == 3  # Steps 1 and 2 have nothing in common.


def test_a_layer_that_a_batch_skips_has_a_gradient_of_zero():
    model = net()
    optimizer = AdaScale(SGD(model.parameters(), lr=1e-30), scale=8.0, smoothing=0.0)
    loss_of(model, 1).backward()
    first = [param.grad.double() for param in model.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    model[2](torch.ones(1, 7)).sum().backward()
    (second,) = (model[2].weight.grad.double(),)
    optimizer.step()
    old = torch.cat([grad.flatten() for grad in first])
    new = torch.cat([*(torch.zeros_like(grad).flatten() for grad in first[:2]), second.flatten()])
    variance = 8.0 * float((new - old).square().sum()) / 2
    square = float(((new + old) / 2).square().sum()) - variance / 16
    assert optimizer.gain() == pytest.approx(gain(bounded(Moments(variance, square)), 8.0), rel=1e-6)
