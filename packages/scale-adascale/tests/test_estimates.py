"""What is known after all steps so far stands in parameter groups, and survives whatever saves these."""

from __future__ import annotations

import io

import pytest
import torch
from adascale_cases import backward, build, linear, net, run_passes
from torch import nn
from torch.optim import SGD, AdamW

from scale_adascale import AdaScale
from scale_adascale.estimates import Estimates, EstimatorState
from scale_adascale.gain import Moments


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_a_training_that_is_saved_and_loaded_goes_on_to_the_bit(kind):
    def build() -> tuple[nn.Module, AdaScale]:
        model = net()
        return model, AdaScale(kind(model.parameters(), lr=0.05), num_gradients_to_accumulate=2, scale=6.0)

    def train(model: nn.Module, optimizer: AdaScale, steps: range) -> None:
        for step in steps:
            run_passes(model, (2 * step, 2 * step + 1))
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build()
    train(model, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(model, optimizer, range(3, 6))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other, loaded = build()
    other.load_state_dict(saved["model"])
    loaded.load_state_dict(saved["optimizer"])
    assert loaded.progress > 3
    train(other, loaded, range(3, 6))
    assert loaded.gain() == optimizer.gain() and loaded.progress == optimizer.progress
    assert loaded.noise_scale(4) == optimizer.noise_scale(4)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_the_inner_optimizers_state_loads_and_gains_start_anew():
    model = linear()
    plain = SGD(model.parameters(), lr=0.3, momentum=0.9)
    backward(model, [1.0, 0.0])
    plain.step()
    model.zero_grad()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.1, momentum=0.9), num_gradients_to_accumulate=2)
    backward(model, [1.0, 0.0], [0.0, 1.0])
    optimizer.step()
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.gain() == 1.0 and optimizer.param_groups[0]["lr"] == 0.3


def test_gradients_of_zero_leave_the_gain():
    model = linear()
    optimizer = AdaScale(SGD(model.parameters(), lr=0.0), num_gradients_to_accumulate=2)
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    before = optimizer.gain()
    optimizer.zero_grad()
    backward(model, [0.0, 0.0], [0.0, 0.0])
    optimizer.step()
    assert optimizer.gain() == before > 1


def sample(variance: float, square: float) -> list[Moments | None]:
    return [Moments(variance, square), Moments(2 * variance, square)]


def test_a_group_not_measured_keeps_its_average_and_others_go_on():
    before = Estimates.empty(2).updated(sample(3.0, 1.0), 0.5, debias=True, preconditioned=False)
    after = before.updated([None, Moments(0.0, 5.0)], 0.5, debias=True, preconditioned=False)
    assert after.groups[0] == before.groups[0] and after.groups[1] != before.groups[1]
    assert before.updated([None, None], 0.5, debias=True, preconditioned=False) is before
    assert Estimates.empty(2).has_begun is False and before.has_begun is True


def test_averages_measured_the_other_way_go_and_progress_stays():
    raw = Estimates.empty(2).updated(sample(3.0, 1.0), 0.5, debias=True, preconditioned=False).with_progress(1.5)
    for first, second in ((False, True), (True, False)):
        old = raw.updated(sample(7.0, 2.0), 0.5, debias=True, preconditioned=first)
        new = old.updated(sample(9.0, 4.0), 0.5, debias=True, preconditioned=second)
        fresh = Estimates.empty(2).updated(sample(9.0, 4.0), 0.5, debias=True, preconditioned=second)
        assert new.groups == fresh.groups and new.noise == fresh.noise and new.progress == 1.5


def test_averages_stay_in_param_groups_and_are_read_after_loads():
    optimizer, other = (SGD([{"params": [nn.Parameter(torch.ones(1))]} for _ in range(2)], lr=0.1) for _ in range(2))
    state = EstimatorState(optimizer)
    estimates = Estimates.empty(2).updated(sample(3.0, 1.0), 0.5, debias=True, preconditioned=True).with_progress(1.5)
    state.store(estimates.with_progress(2.0))
    loaded = EstimatorState(other)
    assert loaded.estimates.progress == 0.0
    other.load_state_dict(optimizer.state_dict())
    assert loaded.estimates.groups == estimates.groups and loaded.estimates.noise == estimates.noise
    assert loaded.estimates.progress == 3.5
    assert loaded.estimates.is_preconditioned is True


@pytest.mark.parametrize("key, row", [("adascale", [1.0, 2.0, 3.0]), ("adascale", None), ("adascale_run", {"a": 1})])
def test_an_older_versions_state_is_refused_before_loading(key, row):
    model, optimizer = build(model=linear())
    backward(model, [1.0, 4.0], [5.0, 0.5])
    optimizer.step()
    before = optimizer.gain(), optimizer.progress
    saved = optimizer.state_dict()
    saved["param_groups"][0] |= {"lr": 7.0, key: row}
    with pytest.raises(ValueError, match=rf"expected \d numbers as '{key}' of a parameter group.*starts over"):
        optimizer.load_state_dict(saved)
    assert (optimizer.gain(), optimizer.progress) == before and optimizer.param_groups[0]["lr"] == 0.1
