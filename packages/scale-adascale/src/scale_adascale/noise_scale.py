"""The gradient noise scale: the batch size above which more samples per step stop to pay, and how sure that is.

B = tr(Sigma) / |G|^2, with Sigma the covariance of the gradient of a single sample and G the expected gradient
(McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, section 2.2; both parts without
bias, appendix A). A batch of b samples has the variance tr(Sigma) / b, so B is b times the variance of a batch over
the square.

The critical batch size, at which a training takes twice the least number of steps and twice the least number of
samples, is about B (section 2.3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from scale_adascale.gain import Moments, is_real


class NoiseScale(NamedTuple):
    """A gradient noise scale, in samples.

    Attributes:
        value: The estimate; infinite where no gradient can be seen through the noise.
        low: The lower end of the confidence interval, at least 0.
        high: Its upper end; infinite where the data do not exclude that there is noise only.
    """

    value: float
    low: float
    high: float

    @property
    def critical_batch_size(self) -> float:
        """About the batch size, in samples, at which a training takes twice the least number of samples and steps.

        With batches that are small beside it twice the samples take half the steps; with large ones hardly fewer:

            steps(m) = least steps * (1 + critical / m)        samples(m) = least samples * (1 + m / critical)

        (McCandlish et al., arXiv 1812.06162, section 2.3.) The noise scale is its estimate, exact where all directions
        of the loss have the same curvature, and mostly right within a small factor. It grows during a training.
        """
        return self.value


@dataclass(frozen=True)
class NoiseAverage:
    """Moving averages of the two moments, and of their squares, by which one knows how sure they are.

    Unlike what the gain is computed from these are not cut off at 0, so that they are without bias.

    Attributes:
        variance: Mean of the variances of a batch of scale 1.
        square: Mean of the squared norms of the expected gradient.
        variance_squared: Mean of variance^2.
        square_squared: Mean of square^2.
        product: Mean of variance * square.
        weight: How much of the exponential averages has been filled.
        weights_squared: The sum of the squares of the weights of single steps, before division by `weight`^2.
    """

    variance: float = 0.0
    square: float = 0.0
    variance_squared: float = 0.0
    square_squared: float = 0.0
    product: float = 0.0
    weight: float = 0.0
    weights_squared: float = 0.0

    def after(self, new: Moments, smoothing: float, overlap: int = 1) -> NoiseAverage:
        """Returns the averages when one more step was measured.

        Args:
            new: What it has measured.
            smoothing: The part of the old averages that stays.
            overlap: In how many steps each gradient has a part: successive gradients that are compared, in two; so many
                steps are then as sure as one would be, at worst.
        """
        weight = smoothing * self.weight + (1 - smoothing)
        keep = smoothing * self.weight / weight
        variance, square = new
        values = (variance, square, variance**2, square**2, variance * square)
        mixed = [keep * old + (1 - keep) * now for old, now in zip(self.as_list(), values, strict=False)]
        squares = smoothing**2 * self.weights_squared + overlap * (1 - smoothing) ** 2
        return NoiseAverage.from_list([*mixed, weight, squares])

    def times(self, factor: float) -> NoiseAverage:
        """Returns the averages for a batch of scale 1 whose variance is so many times as large."""
        return NoiseAverage(
            factor * self.variance,
            self.square,
            factor**2 * self.variance_squared,
            self.square_squared,
            factor * self.product,
            self.weight,
            self.weights_squared,
        )

    @property
    def effective_steps(self) -> float:
        """How many steps of equal weight would average as well; 0 before the first."""
        return self.weight**2 / self.weights_squared if self.weights_squared else 0.0

    def as_list(self) -> list[float]:
        """The seven numbers."""
        means = [self.variance, self.square, self.variance_squared, self.square_squared, self.product]
        return [*means, self.weight, self.weights_squared]

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> NoiseAverage:
        """The inverse of `as_list`."""
        return cls(*(float(number) for number in numbers))


def noise_scale(average: NoiseAverage, base_batch_size: float, confidence: float = 0.95) -> NoiseScale:
    """Returns the noise scale in samples, with Fieller's interval for the ratio of two means.

    The interval takes steps for independent, and means of them for normal: believe it after some tens of steps.

    Args:
        average: Moments of a batch of scale 1.
        base_batch_size: How many samples such a batch has.
        confidence: How often the interval is to hold the true value, above 0 and below 1.

    Raises:
        ValueError: A number out of its range.
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
    """Returns what a sample of this batch size is worth, beside one of the base batch size.

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
    # The square can't be told from 0: no ratio is too large. If the variance can be, some are too small.
    if constant <= 0 or leading >= 0:
        return 0.0, math.inf
    return (linear - root) / leading, math.inf
