"""The gradient noise scale: the batch size above which more samples per step stop to pay, with a confidence interval.

B = tr(Sigma) / |G|^2, with Sigma the covariance of the gradient of a single sample and G the expected gradient
(McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, section 2.2; both parts without
bias, appendix A). A batch of b samples has the variance tr(Sigma) / b, so B is b times the variance of a batch over
the square.

The critical batch size, at which a training takes twice the least number of steps and twice the least number of
samples, is about B (section 2.3).
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from scale_adascale.estimates import NoiseAverage
from scale_adascale.gain import is_real


class NoiseScale(NamedTuple):
    """A gradient noise scale, in samples.

        >>> from scale_adascale import NoiseScale
        >>> noise = NoiseScale(value=400.0, low=250.0, high=900.0)  # of optimizer.noise_scale(64)
        >>> noise.low < noise.value < noise.high
        True

    Attributes:
        value: The estimate; infinite where no gradient can be seen through the noise.
        low: The lower end of the confidence interval, at least 0.
        high: Its upper end; infinite where the data do not exclude that there is noise only.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """

    value: float
    low: float
    high: float

    @property
    def critical_batch_size(self) -> float:
        """About the batch size, in samples, at which a training takes twice the least number of samples and steps.

        With batches that are small relative to it twice the samples take half the steps; with large ones hardly fewer:

            steps(m) = least steps * (1 + critical / m)        samples(m) = least samples * (1 + m / critical)

        (McCandlish et al., arXiv 1812.06162, section 2.3.) The noise scale is its estimate, exact where all directions
        of the loss have the same curvature, and mostly right within a small factor. It grows during a training.
        """
        return self.value


def noise_scale(average: NoiseAverage, base_batch_size: float, confidence: float = 0.95) -> NoiseScale:
    """The noise scale from moments of a batch of scale 1 of `base_batch_size` samples, with Fieller's interval.

    The interval takes steps for independent, and means of them for normal: believe it after some tens of steps.
    """
    if not (is_real(base_batch_size) and base_batch_size > 0):
        raise ValueError(f"expected base_batch_size above 0, got {base_batch_size!r}: pass the samples of scale 1")
    if not (is_real(confidence) and 0 < confidence < 1):
        raise ValueError(f"expected confidence between 0 and 1, got {confidence!r}: pass 0.95 for 95 %")
    steps = average.effective_steps
    variance, square = average.variance, average.square
    value = max(variance, 0.0) / square if square > 0 else math.inf
    if steps <= 1:
        return NoiseScale(base_batch_size * value, 0.0, math.inf)
    # The variance of a mean of `steps` values, from that of the values, which one degree of freedom is missing of.
    spread = 1 / (steps - 1)
    limit = NormalDist().inv_cdf(0.5 + confidence / 2) ** 2 * spread
    of_variance = limit * max(average.variance_squared - variance**2, 0.0)
    of_square = limit * max(average.square_squared - square**2, 0.0)
    of_both = limit * (average.product - variance * square)
    low, high = _fieller(variance**2 - of_variance, variance * square - of_both, square**2 - of_square, square > 0)
    return NoiseScale(base_batch_size * value, base_batch_size * low, base_batch_size * high)


def efficiency(batch_size: float, noise: float, base_batch_size: float) -> float:
    """The value of a sample of this batch size, relative to one of the base batch size.

    (B + b) / (B + m), with noise scale B, base b and batch size m (Pollux, arXiv 2008.12260, section 3.1).
    """
    if math.isinf(noise):
        return 1.0
    return (noise + base_batch_size) / (noise + batch_size)


def _fieller(constant: float, linear: float, leading: float, is_positive: bool) -> tuple[float, float]:
    """The ratios x at 0 or above for which leading x^2 - 2 linear x + constant <= 0."""
    root = math.sqrt(max(linear**2 - leading * constant, 0.0))
    if leading > 0 and is_positive:
        return max((linear - root) / leading, 0.0), max((linear + root) / leading, 0.0)
    # The square can't be distinguished from 0: no ratio is too large. If the variance can be, some are too small.
    if constant <= 0 or leading >= 0:
        return 0.0, math.inf
    return (linear - root) / leading, math.inf
