"""Gradients whose mean is not the mean of what was measured are refused; and what changes of the batch do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from adascale_cases import (
    Fails,
    assert_gain,
    assert_gain_of_passes,
    build,
    gradients_of,
    loss_of,
    net,
    plain_gain,
    run_passes,
)
from torch import nn
from torch.optim import SGD

from scale_adascale import AdaScale


def train(model: nn.Module, optimizer: AdaScale, seeds: range) -> None:
    """Steps of as many passes as are said, at a learning rate at which weights do not move."""
    optimizer.param_groups[0]["lr"] = 1e-30
    number = optimizer.num_gradients_to_accumulate
    for index, seed in enumerate(seeds):
        (loss_of(model, seed) / number).backward()
        if index % number == number - 1:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 1e-3),
        lambda model: model.zero_grad(),
        lambda model: model.zero_grad(set_to_none=False),
        lambda model: setattr(model[2].weight, "grad", torch.zeros(3, 7)),
    ],
)
def test_gradients_changed_between_two_passes_are_refused(change: Callable[[nn.Module], object]):
    model, optimizer = build()
    (loss_of(model, 1) / 2).backward()
    change(model)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"changed or cleared after 1 of 2 backward passes.*after the last pass only"
        ):
            (loss_of(model, 2) / 2).backward()
    with pytest.raises(RuntimeError, match="expected 2 backward passes since the last step, got 1"):
        optimizer.step()
    optimizer.zero_grad()
    assert_gain_of_passes(model, optimizer, (1, 2))


def without_zero_grad(model: nn.Module, optimizer: AdaScale) -> None:
    run_passes(model, (5, 6))
    optimizer.step()


def unhooked_between_passes(model: nn.Module, optimizer: AdaScale) -> None:
    (loss_of(model, 5) / 2).backward()
    optimizer.unhook()
    optimizer.hook()


@pytest.mark.parametrize("before", [without_zero_grad, unhooked_between_passes])
def test_a_first_pass_onto_gradients_is_refused_until_cleared(before):
    for clear in (
        lambda model, optimizer: optimizer.zero_grad(),
        lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    ):
        model, optimizer = build(smoothing=0.0)
        optimizer.param_groups[0]["lr"] = 1e-30
        before(model, optimizer)
        for _ in range(2):
            (loss_of(model, 1) / 2).backward()
            with pytest.raises(RuntimeError, match=r"expected no gradients, or zeros, before the first backward pass"):
                optimizer.step()
        clear(model, optimizer)
        assert_gain_of_passes(model, optimizer, (1, 2))


@pytest.mark.parametrize("passes", [1, 2])
def test_another_models_loss_may_pass_between_step_and_zero_grad(passes):
    maker, (model, optimizer) = nn.Linear(3, 5), build(passes, smoothing=0.0, scale=4.0)
    own = AdaScale(torch.optim.SGD(maker.parameters(), lr=0.1), scale=4.0)
    optimizer.param_groups[0]["lr"] = 1e-30
    for seeds in ((5, 6), (1, 2)):
        optimizer.zero_grad()
        for seed in seeds[:passes]:
            (loss_of(model, seed) / passes).backward()
        optimizer.step()
        before = [param.grad.clone() for param in model.parameters()]
        own.zero_grad()
        model(maker(torch.ones(4, 3))).square().mean().backward()
        assert not any(map(torch.equal, before, [param.grad for param in model.parameters()]))
        own.step()
    other = net()
    if passes == 2:
        expected = plain_gain(gradients_of(other, list(other.parameters()), (1, 2)), 4.0)
        assert optimizer.gain() == pytest.approx(expected, rel=1e-6)
    assert optimizer.progress > 2 and own.progress > 0


def test_a_gradient_left_of_a_layer_frozen_since_is_of_no_step():
    model = net()
    loss_of(model, 9).backward()
    model[0].requires_grad_(False)
    optimizer = AdaScale(torch.optim.SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2, smoothing=0.0)
    model[2].zero_grad()
    run_passes(model, (1, 2))
    assert_gain(optimizer, (1, 2), slice(2, 3))


def test_gradients_that_others_have_set_to_zero_are_none():
    model, optimizer = build(smoothing=0.0)
    optimizer.param_groups[0]["lr"] = 1e-30
    for seeds in ((5, 6), (1, 2)):
        assert_gain_of_passes(model, optimizer, seeds)
        optimizer.step()
        model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("passes", [0, 1])
def test_what_a_failed_pass_has_added_is_refused_until_cleared(passes):
    model, optimizer = build()
    for seed in range(passes):
        (loss_of(model, seed) / 2).backward()
    with pytest.raises(ArithmeticError):
        model[2](Fails.apply(model[1](model[0](torch.ones(4, 5))))).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"backward pass has failed after.*Call optimizer\.zero_grad\(\)"):
        (loss_of(model, 7) / 2).backward()
    optimizer.zero_grad()
    assert_gain_of_passes(model, optimizer, (1, 2))


def test_a_hook_that_changes_added_gradients_is_refused():
    model, optimizer = build()

    def clamp(param: torch.Tensor) -> None:
        param.grad.clamp_(-0.01, 0.01)

    handle = model[2].weight.register_post_accumulate_grad_hook(clamp)
    with pytest.raises(RuntimeError, match=r"shape \(3, 7\) has a hook of register_post_accumulate_grad_hook"):
        loss_of(model, 1).backward()
    handle.remove()
    assert_gain_of_passes(model, optimizer, (1, 2))


def test_a_later_hook_is_refused_until_zero_grad_then_measured():
    gains = []
    for late in (False, True):
        model = net()
        if late:
            optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        if late:
            with pytest.raises(
                RuntimeError, match=r"hook that was registered after AdaScale's.*optimizer\.zero_grad\(\)"
            ):
                loss_of(model, 1).backward()
            optimizer.zero_grad()
        else:
            optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
        run_passes(model, (1, 2))
        gains.append(optimizer.gain())
    assert gains[0] == gains[1] and 1 < gains[0] < 2


def test_what_was_unfrozen_without_zero_grad_is_refused():
    model = net()
    model[0].requires_grad_(False)
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1), num_gradients_to_accumulate=2)
    model[0].requires_grad_(True)
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"a parameter of shape \(7, 5\) was unfrozen.*not model\.zero_grad"):
        loss_of(model, 1).backward()
    optimizer.zero_grad()
    other = net()
    expected = plain_gain(gradients_of(other, list(other.parameters()), [1, 2]), 2.0)
    run_passes(model, (1, 2))
    assert optimizer.gain() == pytest.approx(expected, rel=1e-6)


def test_a_step_without_a_parameter_that_is_trained_says_so():
    model, optimizer = build()
    model.requires_grad_(False)
    optimizer.unhook()
    optimizer.hook()
    with pytest.raises(RuntimeError, match=r"no parameter of the optimizer can have a gradient.*Unfreeze some"):
        optimizer.step()


@pytest.mark.parametrize("update", [True, False])
def test_the_noise_scale_in_samples_stays_when_passes_are_added(update):
    """The small batch stays, so its noise does, in whichever order both numbers are set."""
    for scale_first in (True, False):
        model, optimizer = build(2)
        train(model, optimizer, range(20))
        before = optimizer.noise_scale(4)
        for is_scale in (scale_first, not scale_first):
            if is_scale:
                optimizer.set_scale(4.0, update_estimate=update)
            else:
                optimizer.set_num_gradients_to_accumulate(4)
        assert optimizer.noise_scale(4) == pytest.approx(before)
        assert 0 < before.value < float("inf")


def test_the_noise_scale_in_samples_stays_at_another_scale():
    model, optimizer = build(4)
    train(model, optimizer, range(40))
    before = optimizer.noise_scale(16 / optimizer.scale)
    optimizer.set_scale(8.0)
    assert optimizer.noise_scale(16 / optimizer.scale) == pytest.approx(before)
    optimizer.set_scale(2.0)
    assert optimizer.noise_scale(16 / optimizer.scale) == pytest.approx(before)
    train(model, optimizer, range(40, 44))
    other_model, other = build(4, scale=2.0)
    train(other_model, other, range(44))
    assert optimizer.noise_scale(8).value == pytest.approx(other.noise_scale(8).value, rel=1e-5)


def test_without_smoothing_the_noise_scale_still_has_an_interval():
    model, optimizer = build(2, smoothing=0.0)
    train(model, optimizer, range(60))
    found = optimizer.noise_scale(4)
    assert 0 < found.low < found.value < found.high < float("inf")
