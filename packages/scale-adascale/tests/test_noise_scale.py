"""The gradient noise scale against known noise, and how often its interval holds the truth."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from scale_adascale.estimates import NoiseAverage
from scale_adascale.gain import Moments, moments
from scale_adascale.noise_scale import NoiseScale, efficiency, noise_scale


def averaged(samples: list[Moments], smoothing: float = 0.0) -> NoiseAverage:
    average = NoiseAverage()
    for sample in samples:
        average = average.updated(sample, smoothing)
    return average


def steps_of(number: int, seed: int, deviation: float, true: float, batches: int = 4) -> list[Moments]:
    """Moments of steps of `batches` gradients in 50 dimensions, noise and length of the expected one as given."""
    generator = torch.Generator().manual_seed(seed)
    expected = torch.full((50,), true / 50**0.5, dtype=torch.float64)
    gradients = expected + deviation * torch.randn(number, batches, 50, dtype=torch.float64, generator=generator)
    local, total = gradients.square().sum((1, 2)).tolist(), gradients.mean(1).square().sum(1).tolist()
    return [moments(a, b, batches, batches) for a, b in zip(local, total, strict=True)]


def test_of_known_noise_the_scale_is_found():
    """tr(Sigma) of a batch of 8 is 50 * 0.4^2 = 8, |G|^2 = 4, so B = 8 * 8 / 4 = 16."""
    found = noise_scale(averaged(steps_of(2000, 0, 0.4, 2.0), 0.9995), 8)
    assert found.low < 16 < found.high
    assert found.value == pytest.approx(16, rel=0.05)
    assert found.high - found.low < 2


@pytest.mark.parametrize("confidence", [0.5, 0.95])
@pytest.mark.parametrize("steps, smoothing", [(60, 0.999), (150, 0.95)])
def test_the_interval_holds_the_truth_as_often_as_it_says(confidence, steps, smoothing):
    """Of 400 runs, within four standard deviations of a fair coin of that side; also where old steps fade."""
    held = 0
    for seed in range(400):
        found = noise_scale(averaged(steps_of(steps, seed, 0.4, 2.0), smoothing), 8, confidence)
        held += found.low <= 16 <= found.high
    assert abs(held / 400 - confidence) < 4 * math.sqrt(confidence * (1 - confidence) / 400)


def test_where_there_is_noise_only_the_upper_end_is_infinite():
    found = noise_scale(averaged(steps_of(50, 1, 1.0, 0.0), 0.99), 1)
    assert found.high == math.inf and found.low > 25


def test_before_two_steps_nothing_is_known():
    assert noise_scale(NoiseAverage(), 4) == (math.inf, 0.0, math.inf)
    one = noise_scale(averaged([Moments(3.0, 1.5)]), 4)
    assert one == (8.0, 0.0, math.inf)


def test_steps_that_are_all_alike_leave_no_doubt():
    found = noise_scale(averaged([Moments(3.0, 1.5)] * 5, 0.9), 4)
    assert found == pytest.approx((8.0, 8.0, 8.0))


def test_more_smoothing_is_an_average_of_more_steps():
    """A geometric average of factor s counts as (1 + s) / (1 - s) equal ones, once it is filled."""
    for smoothing in (0.0, 0.5, 0.9):
        average = averaged([Moments(1.0, 1.0)] * 300, smoothing)
        assert average.effective_steps == pytest.approx((1 + smoothing) / (1 - smoothing), rel=1e-9)


def test_numbers_out_of_their_range_are_refused():
    with pytest.raises(ValueError, match="base_batch_size above 0, got 0"):
        noise_scale(NoiseAverage(), 0)
    with pytest.raises(ValueError, match="confidence between 0 and 1, got 95"):
        noise_scale(NoiseAverage(), 1, 95)


def test_a_base_batchs_sample_is_worth_one_and_a_large_ones_less():
    assert efficiency(64, noise=100, base_batch_size=64) == 1.0
    assert efficiency(264, noise=100, base_batch_size=64) == pytest.approx(164 / 364)
    assert efficiency(1000, noise=math.inf, base_batch_size=64) == 1.0


def test_samples_that_share_gradients_are_half_as_many():
    """Successive gradients g1, g2, g3 make two samples, and g2 has a part in both; the interval must not be short."""
    held = 0
    for run in range(200):
        generator = torch.Generator().manual_seed(run)
        gradients = 0.5 / 50**0.5 + torch.randn(61, 50, dtype=torch.float64, generator=generator) / 50**0.5
        average = NoiseAverage()
        for old, new in itertools.pairwise(gradients):
            square = float(old @ new)
            average = average.updated(Moments(float((new - old).square().sum()) / 2, square), 0.99, overlap=2)
        found = noise_scale(average, base_batch_size=1)
        held += found.low <= 4.0 <= found.high
    assert held >= 190


def test_the_critical_batch_size_is_estimated_by_the_noise_scale():
    """Descending a paraboloid along noisy gradients with the best step length, so that it takes what theory says.

    A step of m samples brings the loss down by the part |G|^2 / (|G|^2 + tr(Sigma) / m) of what one without noise does
    (McCandlish et al., eq. 2.6), if the curvature is that of the identity: half of it at m = B.
    """
    found = NoiseScale(40.0, 30.0, 55.0)
    square, trace = 2.0, 80.0  # B = 40.
    generator = torch.Generator().manual_seed(0)
    center = torch.full((50,), (square / 50) ** 0.5, dtype=torch.float64)  # The gradient of |x - center|^2 / 2 at 0.
    noise = torch.randn(20000, 50, dtype=torch.float64, generator=generator)
    gradients = center + noise * (trace / 50 / found.critical_batch_size) ** 0.5
    part = found.critical_batch_size / (found.critical_batch_size + trace / square)
    gained = square / 2 - (part * gradients - center).square().sum(1).mean().item() / 2
    assert gained == pytest.approx(0.5 * square / 2, rel=0.02)
    assert found.critical_batch_size == found.value
