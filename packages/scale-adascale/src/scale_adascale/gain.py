"""The gain of AdaScale: how many steps of the small batch one step of the large batch is worth.

Numbers in, numbers out. With g the gradient of a batch of scale 1, mu^2 = |E g|^2 and sigma^2 = tr Cov(g), a batch
that is S times as large has the gain

    r = (sigma^2 + mu^2) / (sigma^2 / S + mu^2),    1 <= r <= S

(Johnson et al., "AdaScale SGD", arXiv 2007.05105, section 3): S where noise is all there is, 1 where there is none.
Both moments are estimated without bias from n gradients g_1 .. g_n that one step averages to G (appendix B.3, for n
that need not be S). With L = |g_1|^2 + .. + |g_n|^2 and T = |G|^2:

    sigma^2 = S/n (L - n T) / (n - 1)               mu^2 = T - sigma^2 / S

    gradients           S   L      T      sigma^2  mu^2   r
    (1, 0), (0, 1)      2   2      0.5    1        0      2
    (1, 1), (0, 1)      2   3      1.25   0.5      1      1.2
    (1, 1), (1, 1)      2   4      2      0        2      1
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

_LEAST, _LEAST_PART = 1e-6, 1e-3
"""The least variance that is believed, as in FairScale; of short gradients, the least part of their square."""


class Moments(NamedTuple):
    """What the gain is made of.

    Attributes:
        variance: sigma^2, the trace of the covariance of the gradient of a batch of scale 1.
        square: mu^2, the squared norm of the expected gradient.
    """

    variance: float
    square: float


def moments(local: float, total: float, num_gradients: float, scale: float) -> Moments:
    """Estimates both moments, without bias; so either may come out below zero.

    Args:
        local: L, the sum of the squared norms of the gradients.
        total: T, the squared norm of their mean.
        num_gradients: n, above 1. Of gradients g_i of batches of other sizes, of which each counts w_i in the mean, it
            is 1 / sum(w_i^2), and L is n^2 sum(w_i^2 |g_i|^2).
        scale: S, how many times the batch of all n is as large as one of scale 1.
    """
    assert num_gradients > 1, "the variance of one gradient is not known"
    variance = scale / num_gradients * (local - num_gradients * total) / (num_gradients - 1)
    return Moments(variance, total - variance / scale)


def moments_of_two(first: float, second: float, product: float, scale: float) -> Moments:
    """Estimates both moments from two whole batches, each of scale S.

    Args:
        first: The squared norm of one batch's gradient.
        second: That of the other.
        product: Their inner product.
        scale: S.
    """
    # Together they are one batch of twice the scale, in two parts.
    return moments(first + second, (first + second + 2 * product) / 4, 2, 2 * scale)


def bounded(estimate: Moments) -> Moments:
    """Returns moments as they can be: a square is not below 0, and some noise there always is."""
    square = max(estimate.square, 0.0)
    return Moments(max(estimate.variance, min(_LEAST, _LEAST_PART * square)), square)


def gain(estimate: Moments, scale: float) -> float:
    """Returns r of moments that are not below 0; 1 where both are 0, of which nothing can be said.

    Example:
        >>> gain(Moments(variance=1.0, square=1.0), scale=2.0)
        1.3333333333333333
    """
    variance, square = estimate
    below = variance / scale + square
    return (variance + square) / below if below > 0 else 1.0


# Moving averages of what each step measures, which is far too noisy to be used as it is.
#
# The average of one parameter group is four numbers, kept as a list so that any checkpoint can hold them.


@dataclass(frozen=True)
class Average:
    """The moving average of the moments of one parameter group.

    Attributes:
        variance: Of what was measured so far; 0 before anything was.
        square: The same; 1 before anything was measured, so that the gain is 1.
        weight: How much of an exponential average has been filled, from 0 towards 1.
        count: How many steps it has seen.
    """

    variance: float = 0.0
    square: float = 1.0
    weight: float = 0.0
    count: float = 0.0

    @property
    def moments(self) -> Moments:
        """The averages."""
        return Moments(self.variance, self.square)

    def after(self, new: Moments, smoothing: float, *, debias: bool) -> Average:
        """Returns the average when one more step was measured.

        Args:
            new: What it has measured.
            smoothing: The part of the old average that stays, from 0 to below 1.
            debias: Divide an exponential average by the part of it that was filled (as Adam does). Otherwise the plain
                mean, until that has seen 1 / (1 - smoothing) steps, and an exponential average from then on (AdaScale,
                appendix B.3).
        """
        weight, count = smoothing * self.weight + (1 - smoothing), self.count + 1
        if debias:
            keep = smoothing * self.weight / weight
        elif count * (1 - smoothing) < 1:
            keep = self.count / count
        else:
            keep = smoothing if self.count else 0.0
        variance, square = (keep * old + (1 - keep) * now for old, now in zip(self.moments, new, strict=True))
        return Average(variance, square, weight, count)

    def at_scale(self, old: float, new: float) -> Average:
        """Returns it with the variance multiplied by old / new, as FairScale does when the scale changes."""
        return Average(self.variance * (old / new), self.square, self.weight, self.count)

    def as_list(self) -> list[float]:
        """The four numbers."""
        return [self.variance, self.square, self.weight, self.count]

    @classmethod
    def from_list(cls, numbers: Sequence[float]) -> Average:
        """The inverse of `as_list`."""
        return cls(*(float(number) for number in numbers))


def is_real(value: Any) -> bool:
    """Whether it is one that can be compared with others, as what comes from a command line or a file may not be."""
    return isinstance(value, numbers.Real) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    )


def check_scale(scale: Any) -> None:
    """Refuses what is no scale.

    Raises:
        ValueError: It is below 1, infinite, or not a number.
    """
    if not is_real(scale) or not 1 <= scale < math.inf:
        raise ValueError(
            f"Scale must be at least 1, got {scale!r}: pass the size of the batch of one step, over all ranks and "
            "micro-batches, divided by that of the small batch whose learning rate you know"
        )
