"""The batch size at which a training goes forward fastest: measured speed times the value of a sample.

A larger batch keeps the machine busier, and each of its samples is worth less:

    goodput(m) = samples per second(m) * (B + b) / (B + m)

with noise scale B and base batch size b (Qiao et al., "Pollux", arXiv 2008.12260, section 3). Seconds per step are
those that were measured; between and beyond them, a line through them: a constant part, as communication and the
optimizer, and one that grows with the batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar, cast

from scale_adascale.gain import check_scale
from scale_adascale.noise_scale import NoiseScale, efficiency
from scale_core.arguments import checked_arguments
from scale_core.tree import map_tensors, tensors_in


class Speed(NamedTuple):
    """Seconds of a step: `constant + per_sample * batch size`."""

    constant: float
    per_sample: float

    def seconds(self, batch_size: float) -> float:
        return self.constant + self.per_sample * batch_size


class Suggestion(NamedTuple):
    """A batch size and its estimated goodput.

        >>> from scale_adascale import suggest_batch_size
        >>> best = suggest_batch_size({64: 0.50, 128: 0.52, 256: 0.56}, noise=400, base_batch_size=64)
        >>> best.batch_size, round(best.efficiency, 2)
        (512, 0.51)

    Attributes:
        batch_size: Samples of one step, over all ranks.
        goodput: Samples per second, in samples of the base batch size.
        throughput: Samples per second.
        efficiency: The value of a sample, relative to one of the base batch size.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """

    batch_size: int
    goodput: float
    throughput: float
    efficiency: float


@checked_arguments
def fit_speed(seconds: Mapping[int, float]) -> Speed:
    """Fits a line with the least sum of squared relative errors, with both parts at least 0.

    Args:
        seconds: Measured seconds of a step, by batch size.

    Raises:
        ValueError: Nothing was measured, or something that is not above 0.

    Examples:
        >>> from scale_adascale import fit_speed
        >>> speed = fit_speed({32: 0.10, 64: 0.16, 128: 0.28})  # seconds of a step, by batch size
        >>> round(speed.constant, 3), round(speed.per_sample, 5)
        (0.04, 0.00187)
        >>> round(speed.seconds(256), 2)
        0.52

    See also: [the guide to AdaScale](../guides/adascale.md).
    """
    if not seconds or any(not size > 0 or not 0 < step_seconds < math.inf for size, step_seconds in seconds.items()):
        raise ValueError(
            f"expected seconds of a step by batch size, all above 0, got {dict(seconds)}. Measure some steps of one "
            "batch size at least, such as {256: 0.21, 512: 0.34}"
        )
    # Divided by the seconds themselves, so that all measurements count equally: 1 = a x + b y.
    rows = [(1 / step_seconds, size / step_seconds) for size, step_seconds in seconds.items()]
    xx, yy, xy = (sum(x * x for x, _ in rows), sum(y * y for _, y in rows), sum(x * y for x, y in rows))
    x, y = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    if len(rows) > 1 and determinant > 1e-12 * xx * yy:
        constant, per_sample = (x * yy - y * xy) / determinant, (y * xx - x * xy) / determinant
        if constant >= 0 and per_sample >= 0:
            return Speed(constant, per_sample)
        if per_sample < 0:
            return Speed(x / xx, 0.0)
    return Speed(0.0, y / yy)


@checked_arguments
def suggest_batch_size(
    seconds: Mapping[int, float],
    noise: float | NoiseScale,
    base_batch_size: float,
    candidates: Iterable[int] | None = None,
) -> Suggestion:
    """Returns the batch size of the highest goodput.

        >>> suggest_batch_size({64: 0.50, 128: 0.52, 256: 0.56}, noise=400, base_batch_size=64).batch_size
        512

    Args:
        seconds: Measured seconds of a step, by batch size (samples over all ranks). Give at least two sizes, because
            with one we can't tell which part of the time grows with the batch, and assume all of it.
        noise: The gradient noise scale in samples, as `optimizer.noise_scale(base_batch_size)`.
        base_batch_size: Samples of scale 1.
        candidates: Batch sizes to choose from; those measured and their doubles, up to twice the largest one, if None.

    Raises:
        ValueError: A number out of its range, or no candidate.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """
    noise = noise.value if isinstance(noise, NoiseScale) else noise
    if not noise >= 0 or not base_batch_size > 0:
        raise ValueError(f"expected noise >= 0 and base_batch_size > 0, got noise={noise}, {base_batch_size=}")
    speed = fit_speed(seconds)
    sizes = sorted({*seconds, *(2 * size for size in seconds)} if candidates is None else set(candidates))
    if not sizes or sizes[0] < 1:
        raise ValueError(f"expected candidate batch sizes of at least 1, got {sizes}. Pass candidates=[256, 512]")
    suggestions = []
    for size in sizes:
        throughput = size / seconds.get(size, speed.seconds(size))
        worth = efficiency(size, noise, base_batch_size)
        suggestions.append(Suggestion(size, throughput * worth, throughput, worth))
    return max(suggestions, key=lambda each: each.goodput)


Batch = TypeVar("Batch")


def halves(batch: Batch) -> Iterator[Batch]:
    """Yields the first half of a batch and the second, for two backward passes in place of one.

    So one worker which accumulates nothing has two gradients per step. Its estimates are as good as with two
    workers, and cost a second forward and backward pass of half the size.

        >>> import torch
        >>> [half.tolist() for half in halves(torch.arange(4))]
        [[0, 1], [2, 3]]

    Args:
        batch: Tensors [samples, ...], in any nest of lists, tuples and dicts.

    Raises:
        ValueError: The samples are no even number, or not the same for all tensors.

    See also: [the guide to AdaScale](../guides/adascale.md).
    """
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_in(batch)}
    size = next(iter(sizes), 0)
    if len(sizes) != 1 or size % 2 or not size:
        raise ValueError(
            f"expected tensors with one even number of samples, got {sorted(sizes)}. Pass the tensors of one batch, "
            "and drop the last sample of an odd one"
        )
    yield cast(Batch, map_tensors(lambda tensor: tensor[: size // 2], batch))
    yield cast(Batch, map_tensors(lambda tensor: tensor[size // 2 :], batch))


# The fixed rules for large batches, to compare AdaScale with: factors of the learning rate, for
# `torch.optim.lr_scheduler.LambdaLR`.
#
#     rule            factor at scale S                    steps
#     linear          S                                    T / S      Goyal et al., arXiv 1706.02677
#     square root     sqrt(S)                              T / S      Krizhevsky, arXiv 1404.5997
#     LEGW            sqrt(S), after a warm-up of S times  T / S      You et al., arXiv 1901.08256
#                     as many epochs as the base has
#     AdaScale        the gain, measured at each step      until the gains sum up to T


def linear(scale: float) -> float:
    """The factor of linear scaling, the scale itself.

    Raises:
        ValueError: The scale is below 1.

    Examples:
        >>> from scale_adascale import linear
        >>> linear(4)
        4

    See also: [the guide to AdaScale](../guides/adascale.md).
    """
    check_scale(scale)
    return scale


def square_root(scale: float) -> float:
    """The factor of square root scaling.

    Raises:
        ValueError: The scale is below 1.

    Examples:
        >>> from scale_adascale import square_root
        >>> square_root(4)
        2.0

    See also: [the guide to AdaScale](../guides/adascale.md).
    """
    check_scale(scale)
    return math.sqrt(scale)


@checked_arguments
def legw(scale: float, epoch: float, base_warmup_epochs: float) -> float:
    """The factor of "linear-epoch gradual warm-up": the square root, reached over a longer warm-up.

    Args:
        scale: How many times the batch is as large as the base.
        epoch: How far the training is, in epochs, fractions included.
        base_warmup_epochs: The number of warm-up epochs of the base. A batch of scale S warms up for S times this
            number.

    Raises:
        ValueError: The scale is below 1, or a number of epochs below 0.

    Examples:
        >>> from scale_adascale import legw
        >>> legw(4, epoch=1, base_warmup_epochs=1)  # a quarter of the longer warm-up
        0.5
        >>> legw(4, epoch=8, base_warmup_epochs=1)
        2.0

    See also: [the guide to AdaScale](../guides/adascale.md).
    """
    check_scale(scale)
    if epoch < 0 or base_warmup_epochs < 0:
        raise ValueError(f"expected epochs of 0 or more, got epoch={epoch}, base_warmup_epochs={base_warmup_epochs}")
    length = scale * base_warmup_epochs
    return math.sqrt(scale) * (min(1.0, epoch / length) if length else 1.0)
