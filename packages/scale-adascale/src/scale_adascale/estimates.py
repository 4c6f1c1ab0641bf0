"""What AdaScale knows: averages per parameter group, the noise of all of them together, and how far the training is.

It is kept as lists of numbers in the optimizer's own parameter groups, where schedulers keep theirs. So whatever saves
an optimizer saves it, too: `state_dict()` that loads with `weights_only=True`, torch's distributed checkpoints, OSS,
snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import Optimizer

from scale_adascale.gain import Average, Moments, bounded
from scale_adascale.noise_scale import NoiseAverage

_LEAST_SMOOTHING = 0.95
"""Of the noise scale, whatever that of gains is: to tell how sure it is takes some tens of steps."""

OF_GROUP = "adascale"
OF_RUN = "adascale_run"


@dataclass(frozen=True)
class Estimates:
    """Averages of what the steps of a training have measured.

    Attributes:
        groups: One average for each parameter group.
        noise: Of all groups together, for the noise scale.
        progress: Steps of the small batch that the training is worth so far, the sum of its gains.
        is_preconditioned: The averages are those of preconditioned gradients.
        is_scaled: A scaler has multiplied the losses of the last step.
    """

    groups: tuple[Average, ...]
    noise: NoiseAverage = field(default_factory=NoiseAverage)
    progress: float = 0.0
    is_preconditioned: bool = False
    is_scaled: bool = False

    @classmethod
    def of_nothing(cls, num_groups: int) -> Estimates:
        """Before the first step, of so many parameter groups."""
        return cls(tuple(Average() for _ in range(num_groups)))

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> Estimates:
        """What stands in parameter groups; what does not begins anew."""
        averages = (Average.from_list(group[OF_GROUP]) if OF_GROUP in group else Average() for group in groups)
        estimates = cls(tuple(averages))
        if not groups or OF_RUN not in groups[0]:
            return estimates
        progress, preconditioned, scaled, *noise = groups[0][OF_RUN]
        return replace(
            estimates,
            noise=NoiseAverage.from_list(noise),
            progress=float(progress),
            is_preconditioned=bool(preconditioned),
            is_scaled=bool(scaled),
        )

    @property
    def has_begun(self) -> bool:
        """Whether any step was measured."""
        return any(each.count for each in self.groups)

    def together(self) -> Moments:
        """The moments of all groups together."""
        return Moments(sum(each.variance for each in self.groups), sum(each.square for each in self.groups))

    def after(
        self,
        sample: Sequence[Moments | None],
        smoothing: float,
        *,
        debias: bool,
        preconditioned: bool,
        overlap: int = 1,
    ) -> Estimates:
        """Returns the estimates when one more step was measured.

        Args:
            sample: The moments of each group, not cut off; None where nothing could be measured.
            smoothing: The part of the old averages that stays.
            debias: See `Average.after`.
            preconditioned: Gradients were divided by what Adam divides them by. What was measured in the other way is
                forgotten: it has other units.
            overlap: See `NoiseAverage.after`.
        """
        measured = [moments for moments in sample if moments is not None]
        if not measured:
            return self
        old = self if preconditioned == self.is_preconditioned else Estimates.of_nothing(len(self.groups))
        groups = (
            average if moments is None else average.after(bounded(moments), smoothing, debias=debias)
            for average, moments in zip(old.groups, sample, strict=True)
        )
        total = Moments(sum(each.variance for each in measured), sum(each.square for each in measured))
        noise = old.noise.after(total, max(smoothing, _LEAST_SMOOTHING), overlap)
        return replace(self, groups=tuple(groups), noise=noise, is_preconditioned=preconditioned)

    def at_scale(self, old: float, new: float) -> Estimates:
        """Returns them with FairScale's change of the variances when the scale changes."""
        return self.with_groups([average.at_scale(old, new) for average in self.groups])

    def with_groups(self, groups: Sequence[Average]) -> Estimates:
        """Returns them with other averages."""
        return replace(self, groups=tuple(groups))

    def with_noise(self, noise: NoiseAverage) -> Estimates:
        """Returns them with other averages of the noise of all groups."""
        return replace(self, noise=noise)

    def with_progress(self, gain: float, *, scaled: bool = False) -> Estimates:
        """Returns them after a step that was worth so many steps of the small batch, with a scaler or without."""
        return replace(self, progress=self.progress + gain, is_scaled=scaled)


class Reading:
    """The estimates as they stand in an optimizer's parameter groups, into which others may load a state.

    Args:
        optimizer: It is given what begins anew, where nothing stands there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rows: list[Any] = []
        self._estimates = Estimates.of(optimizer.param_groups)
        self.write(self._estimates)

    @property
    def estimates(self) -> Estimates:
        """What stands there now."""
        rows = [group.get(OF_GROUP) for group in self._optimizer.param_groups]
        if len(rows) != len(self._rows) or any(row is not own for row, own in zip(rows, self._rows, strict=True)):
            self.write(Estimates.of(self._optimizer.param_groups))
        return self._estimates

    def write(self, estimates: Estimates) -> None:
        """Puts estimates there."""
        flags = [float(estimates.is_preconditioned), float(estimates.is_scaled)]
        run = [estimates.progress, *flags, *estimates.noise.as_list()]
        self._rows = [average.as_list() for average in estimates.groups]
        for group, row in zip(self._optimizer.param_groups, self._rows, strict=True):
            group[OF_GROUP], group[OF_RUN] = row, list(run)
        self._estimates = estimates


_SAVED_AS = "adascale"


def without_fairscale(state_dict: Mapping[str, Any], num_groups: int) -> tuple[dict[str, Any], list[Average] | None]:
    """Takes what FairScale's AdaScale has saved out of an optimizer's state.

    Args:
        state_dict: The optimizer's.
        num_groups: How many parameter groups it is loaded into.

    Returns:
        The state without it, and the average of each parameter group; None where FairScale has not saved it.

    Raises:
        ValueError: It has averages of another number of parameter groups.
    """
    state = dict(state_dict["state"])
    saved = state.pop(_SAVED_AS, None)
    if saved is None:
        return dict(state_dict), None
    squares, variances = saved["grad_sqr_avg"], saved["grad_var_avg"]
    if not len(squares) == len(variances) == num_groups:
        raise ValueError(
            f"expected a FairScale AdaScale with averages of {num_groups} parameter groups, got those of "
            f"{len(squares)}: build the optimizer with the groups that it was saved with, or load "
            "{**state_dict, 'state': state without 'adascale'}, with which the gain begins anew"
        )
    weights = saved.get("grad_var_avg_unbias", [0.0] * len(squares))
    count = float(saved.get("grad_var_avg_count", 1 if any(weight > 0 for weight in weights) else 0))
    averages = [
        Average(float(variance), float(square), float(weight), count)
        for variance, square, weight in zip(variances, squares, weights, strict=True)
    ]
    return {**state_dict, "state": state}, averages
