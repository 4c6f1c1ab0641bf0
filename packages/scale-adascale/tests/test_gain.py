"""The formulas of the gain: the table of the docstring, and no bias."""

from __future__ import annotations

import pytest
import torch

from scale_adascale.estimates import Average
from scale_adascale.gain import Moments, bounded, gain, moments, moments_of_two


def of(samples: list[list[float]], scale: float) -> Moments:
    """The moments of these gradients, of which a step takes the mean."""
    gradients = torch.tensor(samples, dtype=torch.float64)
    total = gradients.mean(0).square().sum().item()
    return moments(gradients.square().sum().item(), total, len(samples), scale)


@pytest.mark.parametrize(
    "samples, variance, square, expected",
    [
        ([[1.0, 0.0], [0.0, 1.0]], 1.0, 0.0, 2.0),
        ([[1.0, 1.0], [0.0, 1.0]], 0.5, 1.0, 1.2),
        ([[1.0, 1.0], [1.0, 1.0]], 0.0, 2.0, 1.0),
    ],
)
def test_the_table_of_the_docstring_holds(samples, variance, square, expected):
    found = of(samples, 2.0)
    assert found == pytest.approx(Moments(variance, square), abs=1e-15)
    assert gain(found, 2.0) == pytest.approx(expected)


def test_the_estimates_have_no_bias():
    """Of ten thousand draws the means are the true moments, within four standard errors."""
    generator = torch.Generator().manual_seed(0)
    true, deviation, scale = torch.tensor([0.3, -0.4, 1.2], dtype=torch.float64), 1.5, 6.0
    # Three gradients, each of a batch of twice the small one, whose variance is half of the small one's.
    noise = torch.randn(10_000, 3, 3, dtype=torch.float64, generator=generator) * deviation / 2**0.5
    local = (true + noise).square().sum((1, 2))
    total = (true + noise).mean(1).square().sum(1)
    found = torch.tensor([moments(a, b, 3, scale) for a, b in zip(local.tolist(), total.tolist(), strict=True)])
    expected = torch.tensor([3 * deviation**2, true.square().sum()])
    error = 4 * found.std(0) / 100
    assert bool(((found.mean(0) - expected).abs() < error).all()), (found.mean(0), expected, error)
    assert bool((error < 0.1 * expected).all())


def test_two_successive_batches_are_two_samples_of_their_scale():
    first, second = torch.tensor([1.0, 2.0]), torch.tensor([3.0, -1.0])
    found = moments_of_two(5.0, 10.0, float(first @ second), scale=4.0)
    variance_of_batch = float((first - second).square().sum()) / 2
    assert found.variance == pytest.approx(4 * variance_of_batch)
    assert found.square == pytest.approx(float(((first + second) / 2).square().sum()) - variance_of_batch / 2)


@pytest.mark.fault(76)
def test_moments_below_zero_are_cut_off():
    assert bounded(Moments(-3.0, 4.0)) == Moments(1e-6, 4.0)
    assert bounded(Moments(3.0, -4.0)) == Moments(3.0, 0.0)


def test_short_gradients_are_not_taken_for_noise():
    """FairScale's bound, 1e-6 whatever the gradients are, would make a gain of 4 of them."""
    assert gain(bounded(Moments(0.0, 1e-9)), 4.0) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.fault(76)
def test_of_nothing_the_gain_is_one():
    assert gain(Moments(0.0, 0.0), 8.0) == 1.0


def test_an_average_without_bias_is_that_of_adam():
    average = Average()
    values, smoothing = [Moments(3.0, 1.0), Moments(1.0, 2.0), Moments(5.0, 4.0)], 0.9
    for value in values:
        average = average.updated(value, smoothing, debias=True)
    weights = torch.tensor([smoothing**2, smoothing, 1.0], dtype=torch.float64) * (1 - smoothing)
    expected = weights @ torch.tensor(values, dtype=torch.float64) / weights.sum()
    assert list(average.moments) == pytest.approx(expected.tolist())
    assert average.weight == pytest.approx(1 - smoothing**3)
    assert average.count == 3


def test_the_papers_average_begins_as_a_plain_mean():
    """1 / (1 - 0.75) = 4: up to the third step the mean, then three quarters of what was, and one of what is new."""
    average = Average()
    seen = []
    for value in (1.0, 2.0, 6.0, 11.0):
        average = average.updated(Moments(value, value), 0.75, debias=False)
        seen.append(average.variance)
    assert seen == pytest.approx([1.0, 1.5, 3.0, 5.0])


def test_without_smoothing_the_last_step_counts_alone():
    for debias in (True, False):
        average = (
            Average().updated(Moments(2.0, 3.0), 0.0, debias=debias).updated(Moments(5.0, 7.0), 0.0, debias=debias)
        )
        assert average.moments == Moments(5.0, 7.0)


def test_before_the_first_step_the_gain_is_one():
    assert gain(Average().moments, 16.0) == 1.0
