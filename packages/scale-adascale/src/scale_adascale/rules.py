"""The fixed rules for large batches, beside which AdaScale is to be judged: what the learning rate is multiplied by.

Each is a function of the scale and of how far the training is, so that `torch.optim.lr_scheduler.LambdaLR` can use it.

    rule            factor at scale S                    steps
    linear          S                                    T / S      Goyal et al., arXiv 1706.02677
    square root     sqrt(S)                              T / S      Krizhevsky, arXiv 1404.5997
    LEGW            sqrt(S), after a warm-up of S times  T / S      You et al., arXiv 1901.08256
                    as many epochs as the base has
    AdaScale        the gain, measured at each step      until the gains sum up to T
"""

from __future__ import annotations

import math

from scale_adascale.scale import check_scale


def linear(scale: float) -> float:
    """Returns the scale itself.

    Raises:
        ValueError: The scale is below 1.
    """
    check_scale(scale)
    return scale


def square_root(scale: float) -> float:
    """Returns the square root of the scale.

    Raises:
        ValueError: The scale is below 1.
    """
    check_scale(scale)
    return math.sqrt(scale)


def legw(scale: float, epoch: float, base_warmup_epochs: float) -> float:
    """Returns the factor of "linear-epoch gradual warm-up": the square root, reached over a longer warm-up.

    Args:
        scale: How many times the batch is as large as the base.
        epoch: How far the training is, in epochs, fractions included.
        base_warmup_epochs: For how long the base warms up; a batch of scale S does for S times as many epochs.

    Raises:
        ValueError: The scale is below 1, or a number of epochs below 0.
    """
    check_scale(scale)
    if epoch < 0 or base_warmup_epochs < 0:
        raise ValueError(f"expected epochs of 0 or more, got epoch={epoch}, base_warmup_epochs={base_warmup_epochs}")
    length = scale * base_warmup_epochs
    return math.sqrt(scale) * (min(1.0, epoch / length) if length else 1.0)
