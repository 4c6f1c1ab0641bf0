"""What AdaScale knows: averages per parameter group, the noise of all of them together, and how far the training is.

It is kept as lists of numbers in the optimizer's own parameter groups, where schedulers keep theirs. So whatever saves
an optimizer saves it, too: `state_dict()` that loads with `weights_only=True`, torch's distributed checkpoints, OSS,
snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from scale_adascale.averages import Average
from scale_adascale.gain import Moments, bounded
from scale_adascale.noise import NoiseAverage

_LEAST_SMOOTHING = 0.95
"""Of the noise scale, whatever that of gains is: to tell how sure it is takes some tens of steps."""

OF_GROUP = "adascale"
OF_RUN = "adascale_run"


class Estimates:
    """Averages of what the steps of a training have measured.

    Args:
        num_groups: How many parameter groups there are.

    Attributes:
        groups: One average for each.
        noise: Of all groups together, for the noise scale.
        progress: Steps of the small batch that the training is worth so far, the sum of its gains.
        is_preconditioned: The averages are those of preconditioned gradients.
        is_scaled: A scaler has multiplied the losses of the last step.
    """

    def __init__(self, num_groups: int) -> None:
        self.groups = [Average() for _ in range(num_groups)]
        self.noise = NoiseAverage()
        self.progress = 0.0
        self.is_preconditioned = self.is_scaled = False

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
        new = Estimates(len(self.groups))
        old = Estimates(len(self.groups)) if preconditioned != self.is_preconditioned else self
        new.progress, new.is_preconditioned, new.is_scaled = self.progress, preconditioned, self.is_scaled
        new.groups = [
            average if moments is None else average.after(bounded(moments), smoothing, debias=debias)
            for average, moments in zip(old.groups, sample, strict=True)
        ]
        total = Moments(sum(each.variance for each in measured), sum(each.square for each in measured))
        new.noise = old.noise.after(total, max(smoothing, _LEAST_SMOOTHING), overlap)
        return new

    def at_scale(self, old: float, new: float) -> Estimates:
        """Returns them with FairScale's change of the variances when the scale changes."""
        return self.with_groups([average.at_scale(old, new) for average in self.groups])

    def with_groups(self, groups: Sequence[Average]) -> Estimates:
        """Returns them with other averages."""
        new = Estimates(len(groups))
        new.groups, new.noise = list(groups), self.noise
        new.progress, new.is_preconditioned, new.is_scaled = self.progress, self.is_preconditioned, self.is_scaled
        return new

    def with_noise(self, noise: NoiseAverage) -> Estimates:
        """Returns them with other averages of the noise of all groups."""
        new = self.with_groups(self.groups)
        new.noise = noise
        return new

    def with_progress(self, gain: float, *, scaled: bool = False) -> Estimates:
        """Returns them after a step that was worth so many steps of the small batch, with a scaler or without."""
        new = self.with_groups(self.groups)
        new.progress += gain
        new.is_scaled = scaled
        return new

    @classmethod
    def of(cls, groups: Sequence[Mapping[str, Any]]) -> Estimates:
        """What stands in parameter groups; what does not begins anew."""
        estimates = cls(len(groups))
        for number, group in enumerate(groups):
            if OF_GROUP in group:
                estimates.groups[number] = Average.from_list(group[OF_GROUP])
            if OF_RUN in group and number == 0:
                progress, preconditioned, scaled, *noise = group[OF_RUN]
                estimates.progress, estimates.is_preconditioned = float(progress), bool(preconditioned)
                estimates.is_scaled = bool(scaled)
                estimates.noise = NoiseAverage.from_list(noise)
        return estimates


class Reading:
    """The estimates as they stand in an optimizer's parameter groups, into which others may load a state.

    Args:
        optimizer: It is given what begins anew, where nothing stands there.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._rows: list[Any] = []
        self.write(Estimates.of(optimizer.param_groups))

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
