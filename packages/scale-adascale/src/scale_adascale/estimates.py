"""Moving averages of the measurements of steps: per parameter group for the gain, of all groups for the noise scale.

They are kept as lists of numbers in the optimizer's own parameter groups, where schedulers keep theirs. So whatever
saves an optimizer saves them, too: `state_dict()` that loads with `weights_only=True`, torch's distributed checkpoints,
OSS, snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from torch.optim import Optimizer

from scale_adascale.gain import Moments, bounded

GROUP_KEY = "adascale"  # In each parameter group: variance, square, weight, count.
RUN_KEY = "adascale_run"  # The same in all groups: progress, is_preconditioned, and the noise average.

# Of the noise scale, whatever that of gains is: to tell how sure it is takes some tens of steps.
_LEAST_SMOOTHING = 0.95


@dataclass(frozen=True)
class Average:
    """The moving average of the moments of one parameter group."""

    variance: float = 0.0
    square: float = 1.0  # Before anything was measured, so that the gain is 1.
    weight: float = 0.0  # How much of an exponential average has been filled, from 0 towards 1.
    count: float = 0.0  # of steps

    @property
    def moments(self) -> Moments:
        return Moments(self.variance, self.square)

    def updated(self, new: Moments, smoothing: float, *, debias: bool) -> Average:
        """The average with the moments of one more step; `smoothing` of the old one stays, from 0 to below 1.

        With `debias` an exponential average is divided by the part of it that was filled, as Adam does. Otherwise it is
        the plain mean of the first 1 / (1 - smoothing) steps, and an exponential average from then on (AdaScale,
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


@dataclass(frozen=True)
class NoiseAverage:
    """Moving averages of the two moments and of their squares, by which their confidence interval is known.

    Unlike `Average` they are not cut off at 0, so that they are without bias.
    """

    variance: float = 0.0
    square: float = 0.0
    variance_squared: float = 0.0
    square_squared: float = 0.0
    product: float = 0.0  # of variance and square
    weight: float = 0.0  # how much of the exponential averages has been filled
    weights_squared: float = 0.0  # the sum of the squares of the weights of steps, before division by `weight`^2

    def updated(self, new: Moments, smoothing: float, overlap: int = 1) -> NoiseAverage:
        """The averages with the moments of one more step; `overlap` is in how many steps each gradient has a part.

        Successive gradients that are compared have a part in two; so many steps are then as sure as one, at worst.
        """
        weight = smoothing * self.weight + (1 - smoothing)
        keep = smoothing * self.weight / weight
        variance, square = new
        values = (variance, square, variance**2, square**2, variance * square)
        mixed = [keep * old + (1 - keep) * now for old, now in zip(astuple(self), values, strict=False)]
        mixed += [weight, smoothing**2 * self.weights_squared + overlap * (1 - smoothing) ** 2]
        return NoiseAverage(*mixed)

    def with_variance_scaled(self, factor: float) -> NoiseAverage:
        """The averages for a batch of scale 1 whose variance is so many times as large."""
        return replace(
            self,
            variance=factor * self.variance,
            variance_squared=factor**2 * self.variance_squared,
            product=factor * self.product,
        )

    @property
    def effective_steps(self) -> float:
        """How many steps of equal weight would average as well; 0 before the first."""
        return self.weight**2 / self.weights_squared if self.weights_squared else 0.0


@dataclass(frozen=True)
class Estimates:
    """Averages of the measurements of a training's steps."""

    groups: tuple[Average, ...]  # one for each parameter group
    noise: NoiseAverage = field(default_factory=NoiseAverage)  # of all groups together
    progress: float = 0.0  # the sum of the gains: steps of the small batch
    is_preconditioned: bool = False  # The averages are those of preconditioned gradients.

    @classmethod
    def empty(cls, num_groups: int) -> Estimates:
        """Before the first step."""
        return cls(tuple(Average() for _ in range(num_groups)))

    @classmethod
    def from_groups(cls, groups: Sequence[Mapping[str, Any]]) -> Estimates:
        """Those in parameter groups; a group that has none begins again.

        Raises:
            ValueError: One has them in another form, as an older version has saved them.
        """
        averages = tuple(
            Average(*_numbers(group, GROUP_KEY, 4)) if GROUP_KEY in group else Average() for group in groups
        )
        if not groups or RUN_KEY not in groups[0]:
            return cls(averages)
        progress, preconditioned, *noise = _numbers(groups[0], RUN_KEY, 9)
        return cls(averages, NoiseAverage(*noise), progress, bool(preconditioned))

    @property
    def has_begun(self) -> bool:
        return any(group.count for group in self.groups)

    def total(self) -> Moments:
        return Moments(sum(group.variance for group in self.groups), sum(group.square for group in self.groups))

    def updated(
        self,
        sample: Sequence[Moments | None],
        smoothing: float,
        *,
        debias: bool,
        preconditioned: bool,
        overlap: int = 1,
    ) -> Estimates:
        """The estimates with one more step: the moments of each group, not bounded; None where nothing was measured.

        Averages of preconditioned and of raw gradients have other units: when that changes the old ones are dropped.
        """
        measured = [moments for moments in sample if moments is not None]
        if not measured:
            return self
        old = self if preconditioned == self.is_preconditioned else Estimates.empty(len(self.groups))
        groups = tuple(
            average if moments is None else average.updated(bounded(moments), smoothing, debias=debias)
            for average, moments in zip(old.groups, sample, strict=True)
        )
        total = Moments(sum(group.variance for group in measured), sum(group.square for group in measured))
        noise = old.noise.updated(total, max(smoothing, _LEAST_SMOOTHING), overlap)
        return replace(self, groups=groups, noise=noise, is_preconditioned=preconditioned)

    def at_scale(self, old: float, new: float) -> Estimates:
        """The variances multiplied by old / new, as FairScale does when the scale changes."""
        return replace(
            self, groups=tuple(replace(group, variance=group.variance * (old / new)) for group in self.groups)
        )

    def with_progress(self, gain: float) -> Estimates:
        """After a step of this gain."""
        return replace(self, progress=self.progress + gain)


def _numbers(group: Mapping[str, Any], key: str, count: int) -> list[float]:
    """The numbers that a parameter group has under a key of ours."""
    value = group[key]
    try:
        numbers = [float(item) for item in value]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != count:
        raise ValueError(
            f"expected {count} numbers as '{key}' of a parameter group, as AdaScale saves them, got {value!r}. Remove "
            f"'{GROUP_KEY}' and '{RUN_KEY}' from the groups of a state that an older version has saved, and the gain "
            "starts over"
        )
    return numbers


class EstimatorState:
    """The estimates in an optimizer's parameter groups, into which others may load a state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rows: list[Any] = []
        self._estimates = Estimates.from_groups(optimizer.param_groups)
        self.store(self._estimates)

    @property
    def estimates(self) -> Estimates:
        rows = [group.get(GROUP_KEY) for group in self._optimizer.param_groups]
        if len(rows) != len(self._rows) or any(
            row is not row_before for row, row_before in zip(rows, self._rows, strict=True)
        ):
            self.store(Estimates.from_groups(self._optimizer.param_groups))
        return self._estimates

    def store(self, estimates: Estimates) -> None:
        run = [estimates.progress, float(estimates.is_preconditioned), *astuple(estimates.noise)]
        self._rows = [list(astuple(average)) for average in estimates.groups]
        for group, row in zip(self._optimizer.param_groups, self._rows, strict=True):
            group[GROUP_KEY], group[RUN_KEY] = row, list(run)
        self._estimates = estimates


_FAIRSCALE_KEY = "adascale"


def without_fairscale(state_dict: Mapping[str, Any], num_groups: int) -> tuple[dict[str, Any], list[Average] | None]:
    """An optimizer's state without the entries of FairScale's AdaScale, and its average of each parameter group.

    Raises:
        ValueError: It has averages of another number of parameter groups.
    """
    state = dict(state_dict["state"])
    saved = state.pop(_FAIRSCALE_KEY, None)
    if saved is None:
        return dict(state_dict), None
    squares, variances = saved["grad_sqr_avg"], saved["grad_var_avg"]
    if not len(squares) == len(variances) == num_groups:
        raise ValueError(
            f"expected a FairScale AdaScale with averages of {num_groups} parameter groups, got averages of "
            f"{len(squares)}. Build the optimizer with the groups that it was saved with, or load "
            "{**state_dict, 'state': state without 'adascale'}, with which the gain starts over"
        )
    weights = saved.get("grad_var_avg_unbias", [0.0] * len(squares))
    count = float(saved.get("grad_var_avg_count", 1 if any(weight > 0 for weight in weights) else 0))
    averages = [
        Average(float(variance), float(square), float(weight), count)
        for variance, square, weight in zip(variances, squares, weights, strict=True)
    ]
    return {**state_dict, "state": state}, averages
