"""The gain of AdaScale: how many steps of the small batch one step of the large batch is worth.

With g the gradient of a batch of scale 1, mu^2 = |E g|^2 and sigma^2 = tr Cov(g), a batch that is S times as large has
the gain

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
from typing import Any, NamedTuple

from torch import Tensor

# The least variance that is believed, as in FairScale; of short gradients, the least part of their square.
_LEAST, _LEAST_PART = 1e-6, 1e-3


class Moments(NamedTuple):
    """The inputs of the gain."""

    variance: float  # sigma^2, the trace of the covariance of the gradient of a batch of scale 1
    square: float  # mu^2, the squared norm of the expected gradient


def moments(local: float, total: float, num_gradients: float, scale: float) -> Moments:
    """Estimates both moments from L, T, n > 1 and S, without bias; so either may come out below zero.

    Of gradients g_i of batches of other sizes, with weights w_i in the mean, n is 1 / sum(w_i^2) and L is
    n^2 sum(w_i^2 |g_i|^2).
    """
    assert num_gradients > 1, "the variance of one gradient is not known"
    variance = scale / num_gradients * (local - num_gradients * total) / (num_gradients - 1)
    return Moments(variance, total - variance / scale)


def moments_of_two(first: float, second: float, product: float, scale: float) -> Moments:
    """Estimates both moments from two batches of this scale each: the squares of their gradients and the product."""
    # Together they are one batch of twice the scale, in two parts.
    return moments(first + second, (first + second + 2 * product) / 4, 2, 2 * scale)


def bounded(estimate: Moments) -> Moments:
    """Moments as they can be: a square is not below 0, and some noise there always is."""
    square = max(estimate.square, 0.0)
    return Moments(max(estimate.variance, min(_LEAST, _LEAST_PART * square)), square)


def gain(estimate: Moments, scale: float) -> float:
    """r of moments that are not below 0; 1 if both are 0, because r is undefined then.

    >>> gain(Moments(variance=1.0, square=1.0), scale=2.0)
    1.3333333333333333
    """
    variance, square = estimate
    below = variance / scale + square
    return (variance + square) / below if below > 0 else 1.0


def is_real(value: Any) -> bool:
    """Whether it is a number with an order, as a value from a command line or a file may not be."""
    return isinstance(value, numbers.Real) or (
        isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    )


def check_scale(scale: Any) -> None:
    """Raises ValueError for a scale that is below 1, infinite, or not a number."""
    if not is_real(scale) or not 1 <= scale < math.inf:
        raise ValueError(
            f"Scale must be at least 1, got {scale!r}. Pass the size of the batch of one step, over all ranks and "
            "micro-batches, divided by the size of the small batch whose learning rate you know"
        )
